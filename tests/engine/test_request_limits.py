"""One request that the workers cannot take in is refused alone, with the limit; everybody else is answered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

import driver
from engine_process import EngineProcess
from engines import EXECUTOR, IN_PROCESS, SMALL
from vllm_handoff.executor import request_limits

TOKENS = list(range(8, 12))
# Parameters, a part of the refusal, and the same just within the limit.
LIMITS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "stop tokens": (
        {"min_tokens": 2, "stop_token_ids": list(range(10, 10 + 128)), "ignore_eos": False},
        "stop token ids (end tokens included) with min_tokens; the limit is 128",
        {"min_tokens": 2, "stop_token_ids": list(range(10, 10 + 126))},
    ),
    "allowed tokens": (
        {"allowed_token_ids": [8 + n % 500 for n in range(1025)]},
        "1025 allowed token ids; the limit is 1024",
        {"allowed_token_ids": [8 + n % 500 for n in range(1024)]},
    ),
    "bad words": (
        {"bad_words": [f"{n:03}" for n in range(200)]},
        "The max number is 128",  # vLLM's own refusal
        {"bad_words": [f"{n:03}" for n in range(20)]},
    ),
    "bad words' tokens": (
        {"bad_words": [f"{n} abcdefgh ijklmnop qrstuvwx abcdefgh ijklmnop" for n in range(60)]},
        "tokens in bad words; the limit is 1024",
        {"bad_words": ["ab"]},
    ),
    "seed": ({"seed": 2**63}, f"seed {2**63} does not fit into 64 bits", {"seed": 2**63 - 1}),
    "length": ({"max_tokens": 2**31}, f"the limit is {2**31 - 1}", {"max_tokens": 3}),
    "prompt": ({"prompt": [8, 512]}, "oken id 512", {"prompt": [8, 511]}),
    "prompt below": ({"prompt": [-1, 8]}, "oken", {"prompt": [8]}),
}


def ask_all(state: driver.State, limits: dict[str, tuple]) -> dict[str, tuple[str, int, int]]:
    """For each limit: what the refusal says, and how many tokens the request within it and a plain one get."""
    llm, found = state["llm"], {}

    def run(params: dict[str, Any]) -> Any:
        params = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True, **params}
        prompt = {"prompt_token_ids": params.pop("prompt", TOKENS)}
        return llm.generate([prompt], SamplingParams(**params), use_tqdm=False)[0].outputs[0]

    for name, (beyond, _, within) in limits.items():
        try:
            refusal = f"not refused: {run(beyond)}"
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}"
        found[name] = refusal, len(run(within).token_ids), len(run({}).token_ids)
    return found


@pytest.mark.engine
@pytest.mark.timeout(180)
def test_each_limit(tiny_llama: Path, tmp_path: Path) -> None:
    process = EngineProcess(tmp_path, IN_PROCESS)
    try:
        args = {**SMALL, "pipeline_parallel_size": 2, "distributed_executor_backend": EXECUTOR}
        process.run(driver.start, model=str(tiny_llama), **args)
        found = process.run(ask_all, LIMITS)
        process.stop()
    finally:
        process.kill()
    for name, (_, wanted, _) in LIMITS.items():
        refusal, within, plain = found[name]
        assert wanted in refusal and "Error: " in refusal, f"{name}: {refusal}"
        assert within >= 1 and plain == 3, name


def test_the_sizes_are_vllms() -> None:
    # As text: importing it brings Triton.
    import vllm

    source = (Path(vllm.__file__).parent / "v1/worker/gpu/sample/logit_bias.py").read_text()
    for name, value in (
        ("MAX_NUM_ALLOWED_TOKEN_IDS", request_limits.MOST_ALLOWED_TOKEN_IDS),
        ("MAX_NUM_LOGIT_BIAS_TOKENS", request_limits.MOST_LOGIT_BIASES),
        ("MAX_NUM_STOP_TOKEN_IDS", request_limits.MOST_STOP_TOKEN_IDS),
    ):
        assert f"\n{name} = {value}\n" in source


def test_logit_biases() -> None:
    """More biases than the tiny model has tokens."""
    params = SamplingParams(logit_bias=dict.fromkeys(range(1025), 1.0))
    with pytest.raises(VLLMValidationError, match="1025 logit biases; the limit is 1024"):
        request_limits.check_request(params, TOKENS, vocabulary=4096)
    params.logit_bias.popitem()
    request_limits.check_request(params, TOKENS, vocabulary=4096)


def test_a_prompt_without_a_tokenizer() -> None:
    with pytest.raises(VLLMValidationError, match="token 512 is not in the model's vocabulary of 512"):
        request_limits.check_request(None, [3, 512], vocabulary=512)
    request_limits.check_request(None, None, vocabulary=512)
