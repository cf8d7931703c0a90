"""What vLLM's V2 model runner can take of one request; the rest is refused when the request comes in.

The runner keeps each of these in arrays of a fixed size and raises, while it
takes a request into a batch, when one does not fit. That ends the engine, for
everybody. vLLM's own checks at the door do not know these sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# As in vllm/v1/worker/gpu/sample/logit_bias.py (0.32), which a front end should not import: it brings Triton kernels.
MOST_ALLOWED_TOKEN_IDS = 1024
MOST_LOGIT_BIASES = 1024
MOST_STOP_TOKEN_IDS = 128
_INT32_MAX = 2**31 - 1
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


def check_request(params: Any, prompt_token_ids: Sequence[int] | None, vocabulary: int) -> None:
    """Refuse what the workers could not take in.

    Args:
        params: the request's SamplingParams as the engine would get them, or None for a pooling request.
        prompt_token_ids: its prompt, None if that is given as embeddings.
        vocabulary: the model's number of tokens.

    Raises:
        VLLMValidationError: with the limit; a server answers it with status 400.
    """
    if prompt_token_ids:
        # vLLM looks at them only if there is a tokenizer.
        for token in (min(prompt_token_ids), max(prompt_token_ids)):
            if not 0 <= token < vocabulary:
                _refuse("prompt_token_ids", f"token {token} is not in the model's vocabulary of {vocabulary}")
    if params is None:
        return
    _at_most("allowed_token_ids", len(params.allowed_token_ids or ()), MOST_ALLOWED_TOKEN_IDS, "allowed token ids")
    _at_most("logit_bias", len(params.logit_bias or ()), MOST_LOGIT_BIASES, "logit biases")
    if params.min_tokens:
        count = len(params.all_stop_token_ids)
        _at_most("stop_token_ids", count, MOST_STOP_TOKEN_IDS, "stop token ids (end tokens included) with min_tokens")
    _check_bad_words(params.bad_words_token_ids or ())
    if params.seed is not None and not _INT64_MIN <= params.seed <= _INT64_MAX:
        _refuse("seed", f"seed {params.seed} does not fit into 64 bits; the limits are {_INT64_MIN} and {_INT64_MAX}")
    length = len(prompt_token_ids or ()) + (params.max_tokens or 0)
    _at_most("max_tokens", length, _INT32_MAX, "tokens of prompt and max_tokens together")


def _check_bad_words(bad_words: Sequence[Sequence[int]]) -> None:
    if not bad_words:
        return
    import vllm.envs as envs

    remedy = "set {} for the server to change it"
    most = envs.VLLM_MAX_NUM_BAD_WORDS
    _at_most("bad_words", len(bad_words), most, "bad words", remedy.format("VLLM_MAX_NUM_BAD_WORDS"))
    total, most = sum(map(len, bad_words)), envs.VLLM_MAX_BAD_WORDS_TOTAL_TOKENS
    _at_most("bad_words", total, most, "tokens in bad words", remedy.format("VLLM_MAX_BAD_WORDS_TOTAL_TOKENS"))


def _at_most(parameter: str, count: int, most: int, what: str, remedy: str = "") -> None:
    if count > most:
        _refuse(parameter, f"the request has {count} {what}; the limit is {most}{'; ' if remedy else ''}{remedy}")


def _refuse(parameter: str, message: str) -> None:
    from vllm.exceptions import VLLMValidationError

    raise VLLMValidationError(f"{message}.", parameter=parameter)
