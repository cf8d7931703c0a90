"""A real engine with layer_split "auto": the engine and its workers agree on the split."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_handoff.executor.layer_partition import VARIABLE
from vllm_handoff.scheduler_ext.layer_split import OperatingPoint, plan_split
from vllm_handoff.scheduler_ext.model_shape import ModelShape

# So large a vocabulary that the head outweighs a layer.
SHAPE = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=6,
    num_attention_heads=2, num_key_value_heads=1, head_dim=32, vocab_size=400_000, max_position_embeddings=512,
    rms_norm_eps=1e-5, hidden_act="silu", tie_word_embeddings=False, torch_dtype="float32", bos_token_id=1,
    eos_token_id=2, attention_bias=False,
)  # fmt: skip

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(
        model=sys.argv[1], load_format="dummy", skip_tokenizer_init=True, dtype="float32", enforce_eager=True,
        max_model_len=128, max_num_seqs=8, kv_cache_memory_bytes=64 << 20, pipeline_parallel_size=2,
        distributed_executor_backend="vllm_handoff.executor.HandoffExecutor",
        additional_config={"handoff": {"layer_split": "auto"}},
    )
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": [11, 12, 13]}], params)
    layers = llm.collective_rpc(lambda worker: len(worker.model_runner.kv_caches))
    print("RESULT", json.dumps([layers, len(output.outputs[0].token_ids)]))
"""


@pytest.mark.engine
def test_the_stages_hold_the_planned_layers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "run.py").write_text(SCRIPT)
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    # A function is sent to the workers to count their layers.
    environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    command = [sys.executable, str(tmp_path / "run.py"), str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    result = next((line for line in run.stdout.splitlines() if line.startswith("RESULT")), None)
    assert result is not None, run.stdout[-3000:] + run.stderr[-3000:]
    planned = plan_split(ModelShape.of(SHAPE), 2, OperatingPoint()).split
    assert planned == (4, 2)
    assert json.loads(result.removeprefix("RESULT")) == [list(planned), 5]
