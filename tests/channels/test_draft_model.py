"""A draft model on the last stage is built and run as if there were no pipeline, and leaves no trace of that."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
from vllm.config import ModelConfig
from vllm.distributed import parallel_state

from vllm_handoff.worker.draft_model import fit_for_last_stage

PARTITION = "VLLM_PP_LAYER_PARTITION"


@pytest.fixture(autouse=True)
def pipeline(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    pipeline = SimpleNamespace(world_size=2, is_first_rank=False)
    monkeypatch.setattr(parallel_state, "_PP", pipeline)
    monkeypatch.setenv(PARTITION, "17,15")
    return pipeline


def test_a_draft_model_sees_one_stage(pipeline: SimpleNamespace) -> None:
    seen = []

    def look() -> None:
        group = parallel_state.get_pp_group()
        seen.append((group.world_size, group.is_first_rank, os.environ.get(PARTITION)))

    speculator = SimpleNamespace(load_draft_model=look, _run_model=look, propose=look)
    fit_for_last_stage(speculator, "draft_model")
    for method in (speculator.load_draft_model, speculator._run_model, speculator.propose):
        method()
    assert seen == [(1, True, None), (1, True, "17,15"), (2, False, "17,15")]
    assert parallel_state.get_pp_group() is pipeline and os.environ[PARTITION] == "17,15"


def test_an_error_while_it_loads_leaves_no_trace(pipeline: SimpleNamespace) -> None:
    def fail() -> None:
        raise RuntimeError("no such file")

    numbering = ModelConfig.get_num_layers
    for method in ("draft_model", "eagle"):
        speculator = SimpleNamespace(load_draft_model=fail, _run_model=fail)
        fit_for_last_stage(speculator, method)
        with pytest.raises(RuntimeError, match="no such file"):
            speculator.load_draft_model()
    assert parallel_state.get_pp_group() is pipeline and os.environ[PARTITION] == "17,15"
    assert ModelConfig.get_num_layers is numbering


def test_eagles_layers_follow_the_whole_target() -> None:
    config = SimpleNamespace(get_total_num_hidden_layers=lambda: 32)
    speculator = SimpleNamespace(load_draft_model=lambda: ModelConfig.get_num_layers(config, None))
    fit_for_last_stage(speculator, "eagle")
    assert speculator.load_draft_model() == 32


def test_mtp_is_left_alone() -> None:
    speculator = SimpleNamespace(load_draft_model=len)
    fit_for_last_stage(speculator, "mtp")
    assert speculator.load_draft_model is len
