"""Layer splits: from a model's configuration to stage times, the best split, and the advice on chunks."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_handoff.benchmarks.loads import SHAPES
from vllm_handoff.executor import cli
from vllm_handoff.executor.layer_partition import VARIABLE, apply_layer_split
from vllm_handoff.scheduler_ext.chunk_size import PrefillLoad, advise_chunk
from vllm_handoff.scheduler_ext.layer_split import OperatingPoint, assess, even_split, plan_split
from vllm_handoff.scheduler_ext.model_shape import LayerShape, ModelShape, ModelShapeError
from vllm_handoff.scheduler_ext.settings import HandoffSettings

LLAMA = ModelShape.of(SHAPES["8b"])
MOE = {
    "hidden_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 1000, "intermediate_size": 8192, "moe_intermediate_size": 768, "num_experts": 64,
    "num_experts_per_tok": 4, "tie_word_embeddings": True,
}  # fmt: skip


def test_a_dense_model_with_grouped_queries() -> None:
    attention = 4096 * 4096 * 2 + 2 * 4096 * 1024
    assert LLAMA.layers == (LayerShape(attention + 3 * 4096 * 14336),) * 32
    assert sum(layer.always for layer in LLAMA.layers) + 2 * LLAMA.head == pytest.approx(8.03e9, rel=0.001)
    assert (LLAMA.kv_width, LLAMA.attention_width, LLAMA.weight_bytes) == (2048, 4096, 2.0)


def test_heads_without_groups_and_without_a_stated_dimension() -> None:
    shape = ModelShape.of({"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 10})
    assert shape.kv_width == 128
    assert shape.layers[0].always == 4 * 64 * 64 + 3 * 64 * 256


def test_experts_are_read_as_far_as_tokens_use_them() -> None:
    layer = ModelShape.of(MOE).layers[0]
    assert (layer.experts, layer.experts_per_token, layer.expert) == (64, 4, 3 * 2048 * 768)
    assert layer.read(1) == pytest.approx(layer.used)
    assert layer.read(10_000) == pytest.approx(layer.always + 64 * layer.expert)
    assert layer.read(8) < layer.read(64)
    assert ModelShape.of(MOE).tied


@pytest.mark.parametrize(
    "more, sparse",
    [
        ({"first_k_dense_replace": 3}, [3, 4, 5, 6, 7]),
        ({"mlp_only_layers": [0, 7]}, [1, 2, 3, 4, 5, 6]),
        ({"decoder_sparse_step": 2}, [1, 3, 5, 7]),
    ],
)
def test_layers_without_experts_among_those_with(more: dict[str, Any], sparse: list[int]) -> None:
    shape = ModelShape.of(MOE | more)
    assert [i for i, layer in enumerate(shape.layers) if layer.experts] == sparse


def test_shared_experts_latent_attention_and_quantised_weights() -> None:
    shared = ModelShape.of(MOE | {"n_shared_experts": 2}).layers[0]
    assert shared.always - ModelShape.of(MOE).layers[0].always == 3 * 2048 * 2 * 768
    assert ModelShape.of(MOE | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}).kv_width == 576
    for config, width in (({"bits": 4}, 0.5), ({"quant_method": "fp8"}, 1.0), ({"quant_method": "mxfp4"}, 0.5)):
        assert ModelShape.of(MOE | {"quantization_config": config}).weight_bytes == width
    assert ModelShape.of(MOE | {"dtype": "float32"}).weight_bytes == 4.0
    assert len(ModelShape.of({"text_config": MOE, "vision_config": {}}).layers) == 8


@pytest.mark.parametrize(
    "config, what",
    [
        ({"hidden_size": 64}, "no num_hidden_layers"),
        (MOE | {"is_encoder_decoder": True}, "decoder-only"),
        (MOE | {"mamba_d_state": 16}, "recurrent"),
        ({**MOE, "moe_intermediate_size": None, "intermediate_size": None}, "intermediate_size"),
    ],
)
def test_what_cannot_be_weighed_is_refused(config: dict[str, Any], what: str) -> None:
    with pytest.raises(ModelShapeError, match=what):
        ModelShape.of(config)


def test_even_splits_are_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.utils import get_pp_indices

    monkeypatch.delenv(VARIABLE, raising=False)
    for layers, stages in itertools.product((5, 13, 30, 61, 80), (1, 2, 3, 4, 5)):
        theirs = [get_pp_indices(layers, rank, stages) for rank in range(stages)]
        assert even_split(layers, stages) == tuple(end - begin for begin, end in theirs)


def test_the_head_costs_the_last_stage_a_layer_where_decoding_dominates() -> None:
    assert plan_split(LLAMA, 2, OperatingPoint()).split == (17, 15)
    assert plan_split(LLAMA, 2, OperatingPoint(rows=128, prefill_share=0)).split == (17, 15)
    # Prefill meets the head with its last token alone.
    assert plan_split(LLAMA, 2, OperatingPoint(rows=64, prefill_share=0.95)).split == (16, 16)


@given(
    st.lists(st.sampled_from(range(3)), min_size=2, max_size=9),
    st.integers(1, 4),
    st.integers(1, 200),
    st.floats(0, 0.9),
)
def test_no_other_split_is_better(kinds: list[int], stages: int, rows: int, share: float) -> None:
    layers = tuple((LayerShape(10**8), LayerShape(3 * 10**8), LayerShape(10**7, 10**7, 16, 2))[kind] for kind in kinds)
    model = ModelShape(layers, hidden=4096, vocab=50_000, attention_width=4096, kv_width=2048)
    if stages > len(layers):
        with pytest.raises(ValueError, match="cannot be split"):
            plan_split(model, stages, OperatingPoint(rows, share))
        return
    plan = plan_split(model, stages, OperatingPoint(rows, share))
    assert sum(plan.split) == len(layers) and min(plan.split) >= 1
    cuts = itertools.combinations(range(1, len(layers)), stages - 1)
    others = [[b - a for a, b in itertools.pairwise((0, *cut, len(layers)))] for cut in cuts]
    best = min(assess(model, other, OperatingPoint(rows, share)).slowest for other in others)
    assert plan.slowest <= best + 2e-9


@pytest.mark.parametrize("values", [(0, 0.5, 1), (1, 1.0, 1), (1, -0.1, 1), (1, 0.5, 0)])
def test_operating_points_that_make_no_sense_are_refused(values: tuple[int, float, int]) -> None:
    with pytest.raises(ValueError, match="operating point"):
        OperatingPoint(*values)


def test_larger_loads_and_fewer_stages_want_larger_chunks() -> None:
    def best(stages: int, tokens: int) -> int:
        return advise_chunk(LLAMA, even_split(32, stages), PrefillLoad(tokens)).best

    assert best(2, 4096) <= best(2, 32768) <= best(2, 1_000_000)
    assert best(8, 32768) <= best(2, 32768)
    for chunk in advise_chunk(LLAMA, (16, 16), PrefillLoad(32768)).chunks:
        assert 0 < chunk.bubble < 1 and 0 < chunk.rounds_cost < 1
    with pytest.raises(ValueError, match="at least one token"):
        PrefillLoad(0)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["8b"]))
    return tmp_path


def test_the_command_says_what_to_set(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(llama), "--pipeline-parallel-size", "2", "--split", "18,14"]) == 0
    out = capsys.readouterr().out
    assert "VLLM_PP_LAYER_PARTITION=17,15" in out and "18,14" in out and "<- advised" in out
    assert cli.main(["plan", str(llama), "-pp", "2", "--decode-rows", "64", "--prefill-share", "0.95"]) == 0
    assert "leave VLLM_PP_LAYER_PARTITION unset" in capsys.readouterr().out


def test_the_command_speaks_json(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(llama / "config.json"), "-pp", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["environment"] == {"VLLM_PP_LAYER_PARTITION": "17,15"}
    assert said["splits"]["plan"]["layers"] == [17, 15]
    assert max(said["splits"]["plan"]["stage_seconds"]) < max(said["splits"]["even"]["stage_seconds"])


def test_a_recorded_run_takes_the_place_of_the_constants(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stages of 16 layers that took 3 ms and 5 ms: a head worth ten layers or so."""

    def stage(milliseconds: float) -> list:
        return [
            [n, 8, 0, [n * 0.01, None, None, None, None, n * 0.01 + milliseconds / 1000], [0, 1e-4]] for n in (1, 2)
        ]

    recording = tmp_path / "run.json"
    recording.write_text(json.dumps({"stages": [stage(3.0), stage(5.0)]}))
    assert cli.main(["plan", str(llama), "-pp", "2", "--recording", str(recording), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["splits"]["even"]["stage_seconds"] == pytest.approx([3e-3, 5e-3], rel=1e-3)
    assert said["splits"]["plan"]["layers"] == [21, 11]
    assert cli.main(["plan", str(llama), "-pp", "4", "--recording", str(recording), "--recorded-split", "16,16"]) == 0
    assert "the recording" in capsys.readouterr().out
    for wrong in (["--recorded-split", "17,16"], ["--recorded-split", "16"]):
        assert cli.main(["plan", str(llama), "-pp", "2", "--recording", str(recording), *wrong]) == 1
    recording.write_text("{}")
    assert cli.main(["plan", str(llama), "-pp", "2", "--recording", str(recording)]) == 1
    assert "cannot be read as a recording" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, what",
    [
        (["-pp", "33"], "cannot be split over 33"),
        (["-pp", "0"], "cannot be split over 0"),
        (["-pp", "2", "--split", "16"], "2 numbers"),
        (["-pp", "2", "--split", "17,16"], "not of 32 layers"),
        (["-pp", "2", "--prefill-share", "1"], "operating point"),
    ],
)
def test_the_command_refuses_in_one_line(
    llama: Path, arguments: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", str(llama), *arguments]) == 1
    error = capsys.readouterr().err
    assert what in error and error.count("\n") == 1


def test_a_missing_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(tmp_path / "nowhere"), "-pp", "2"]) == 1
    assert "nowhere cannot be read" in capsys.readouterr().err


def _config(stages: int = 2, shape: dict[str, Any] = SHAPES["8b"]) -> Any:
    text = SimpleNamespace(to_dict=lambda: shape)
    return SimpleNamespace(
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages, tensor_parallel_size=1),
        model_config=SimpleNamespace(hf_text_config=text),
    )


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Any:
    import os

    # A copy: what the code under test sets does not outlive the test.
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k != VARIABLE})
    return os.environ


AUTO = HandoffSettings(layer_split="auto")


def test_the_backend_applies_the_plan_if_asked(environment: dict[str, str]) -> None:
    assert apply_layer_split(_config(), HandoffSettings()) is None
    assert VARIABLE not in environment
    assert apply_layer_split(_config(), AUTO) == "17,15"
    assert environment[VARIABLE] == "17,15"
    # Completing the same configuration again, as a child process does, changes nothing.
    assert apply_layer_split(_config(), AUTO) == "17,15"


def test_the_users_partition_wins(environment: dict[str, str]) -> None:
    environment[VARIABLE] = "20,12"
    assert apply_layer_split(_config(), AUTO) is None
    assert environment[VARIABLE] == "20,12"


def test_one_engines_plan_does_not_reach_the_next_engine_of_the_process(environment: dict[str, str]) -> None:
    apply_layer_split(_config(), AUTO)
    assert apply_layer_split(_config(4, SHAPES["1b"]), AUTO) != "17,15"
    apply_layer_split(_config(), AUTO)
    apply_layer_split(_config(), HandoffSettings())
    assert VARIABLE not in environment


def test_what_cannot_be_planned_is_left_to_vllm(environment: dict[str, str]) -> None:
    assert apply_layer_split(_config(shape={"hidden_size": 1}), AUTO) is None
    assert apply_layer_split(_config(stages=1), AUTO) is None
    assert VARIABLE not in environment
