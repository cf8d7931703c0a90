"""A LoRA adapter that cannot be loaded is its own request's error; everybody else is answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import driver
from engine_process import EngineProcess
from engines import EXECUTOR, IN_PROCESS, SMALL

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

CONFIG = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
BROKEN = ("not there", "no configuration", "no weights", "too large a rank", "cut weights")


def write_adapters(folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    for name in ("no configuration", "no weights", "too large a rank", "cut weights", "good"):
        (folder / name).mkdir()
        if name != "no configuration":
            config = {**CONFIG, "r": 512} if name == "too large a rank" else CONFIG
            (folder / name / "adapter_config.json").write_text(json.dumps(config))
    (folder / "cut weights" / "adapter_model.safetensors").write_bytes(b"\x10\0\0\0")
    # Of zeros: it changes no token, and shows that adapters run at all.
    weights = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{part}.weight": torch.zeros(shape)
        for layer in range(4)
        for part, shape in (("A", (8, 64)), ("B", (64, 8)))
    }
    save_file(weights, str(folder / "good" / "adapter_model.safetensors"))


def ask_with(state: driver.State, folder: Path, names: list[str | None]) -> list[tuple[list[int], str]]:
    """The answers to one prompt with these adapters, all in the engine at once: token ids, and why each ended."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    loras = [
        None if name is None else LoRARequest(name, 1 + (*BROKEN, "good").index(name), str(folder / name))
        for name in names
    ]
    prompts = [{"prompt_token_ids": [8, 9, 10]}] * len(names)
    outputs = state["llm"].generate(prompts, params, lora_request=loras, use_tqdm=False)
    return [(list(output.outputs[0].token_ids), str(output.outputs[0].finish_reason)) for output in outputs]


def write(state: driver.State, folder: Path) -> None:
    write_adapters(folder)


def test_each_kind_of_broken_adapter(tiny_llama: Path, tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    args: dict[str, Any] = {**SMALL, "pipeline_parallel_size": 2, "distributed_executor_backend": EXECUTOR}
    # The engine in a process of its own, as a server has it.
    process = EngineProcess(tmp_path, {**IN_PROCESS, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"})
    try:
        process.run(write, adapters)
        process.run(driver.start, model=str(tiny_llama), enable_lora=True, max_lora_rank=16, **args)
        ((tokens, finish),) = process.run(ask_with, adapters, [None])
        assert len(tokens) == 6 and finish == "length"
        names: list[str | None] = []
        for broken in BROKEN:
            names += [None, broken, "good"]
        for name, answer in zip(names, process.run(ask_with, adapters, names), strict=True):
            assert answer == (([], "error") if name in BROKEN else (tokens, "length")), name
        log = process.log.read_text()
        assert "call 'add_lora' failed on rank" in log
        process.stop()
    finally:
        process.kill()
