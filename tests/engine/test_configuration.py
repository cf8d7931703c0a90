"""What a configuration becomes: completed for our executor, untouched for every other, refused with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import configurations
from engine_process import EngineProcess, EngineProcessError
from engines import EXECUTOR, SMALL
from vllm_handoff.executor.configuration import (
    ASYNC_SCHEDULER,
    CPU_WORKER,
    SYNC_SCHEDULER,
    HandoffConfigError,
    _check_gpus,
)
from vllm_handoff.executor.refusals import ALWAYS, ON_A_CPU, WITH_STAGES, UnsupportedFeatureError, check_supported
from vllm_handoff.scheduler_ext.settings import HandoffSettings

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]

OURS = {"distributed_executor_backend": EXECUTOR}
TWO_STAGES = {**OURS, "pipeline_parallel_size": 2}
WITHOUT_PLUGIN = {"VLLM_PLUGINS": "lora_filesystem_resolver"}

NewProcess = Callable[..., EngineProcess]


@pytest.fixture
def new_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewProcess]:
    """Makes processes, with environment variables of their own, that have imported vLLM and loaded no plugin yet."""
    made: list[EngineProcess] = []

    def make(**environment: str) -> EngineProcess:
        made.append(EngineProcess(tmp_path_factory.mktemp("configuration"), environment))
        return made[-1]

    yield make
    for process in made:
        process.kill()


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One process for all tests that leave it as it was."""
    process = EngineProcess(tmp_path_factory.mktemp("configuration"))
    yield process
    process.kill()


@pytest.fixture
def args(tiny_llama: Path) -> dict[str, Any]:
    return {"model": str(tiny_llama), **SMALL}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("backend", [EXECUTOR, "class"])
def test_the_flag_alone_is_enough(process: EngineProcess, args: dict[str, Any], backend: str, stages: int) -> None:
    more = {"distributed_executor_backend": backend, "pipeline_parallel_size": stages}
    assert process.run(configurations.choices, **args, **more) == {
        "worker": CPU_WORKER,
        "scheduler": ASYNC_SCHEDULER,
        "asynchronous": True,
        "v2": True,
    }


def test_asynchronous_scheduling_can_be_switched_off(process: EngineProcess, args: dict[str, Any]) -> None:
    found = process.run(configurations.choices, **args, **TWO_STAGES, async_scheduling=False)
    assert (found["scheduler"], found["asynchronous"]) == (SYNC_SCHEDULER, False)


@pytest.mark.parametrize("assigned", [None, [5]])
def test_too_few_gpus(monkeypatch: pytest.MonkeyPatch, assigned: list[int] | None) -> None:
    platform = SimpleNamespace(is_cuda_alike=lambda: True, device_count=lambda: 1)
    monkeypatch.setattr("vllm.platforms.current_platform", platform, raising=False)
    parallel = SimpleNamespace(
        world_size=4, pipeline_parallel_size=2, tensor_parallel_size=2, assigned_physical_gpu_ids=assigned,
        disable_custom_all_reduce=False, data_parallel_size=1, data_parallel_size_local=1,
    )  # fmt: skip
    with pytest.raises(HandoffConfigError, match="2 stages of 2 ranks need 4 GPUs and 1 can be seen: lower"):
        _check_gpus(parallel, HandoffSettings())
    _check_gpus(parallel, HandoffSettings(share_gpu=True))
    assert parallel.disable_custom_all_reduce
    parallel.world_size = parallel.pipeline_parallel_size = parallel.tensor_parallel_size = 1
    _check_gpus(parallel, HandoffSettings())
    parallel.data_parallel_size = parallel.data_parallel_size_local = 3
    with pytest.raises(HandoffConfigError, match="1 stages of 1 ranks in 3 replicas need 3 GPUs and 1 can be seen"):
        _check_gpus(parallel, HandoffSettings())
    with pytest.raises(HandoffConfigError, match="asks for 3 engines: drop one"):
        _check_gpus(parallel, HandoffSettings(share_gpu=True))


@pytest.mark.parametrize("option", ["worker_cls", "scheduler_cls"])
def test_classes_that_the_user_names(process: EngineProcess, args: dict[str, Any], option: str) -> None:
    kind = option.partition("_")[0]
    named = f"user_classes.User{kind.title()}"
    assert process.run(configurations.choices, **args, **TWO_STAGES, **{option: named})[kind] == named
    flag = f"--{option.replace('_', '-')}"
    for named, complaint in {
        f"user_classes.Foreign{kind.title()}": "Derive it from vllm_handoff",
        "user_classes.nowhere": "cannot be imported",
        "no_such_module.Class": "cannot be imported",
        "user_classes.not_a_class": "is not a class",
    }.items():
        with pytest.raises(EngineProcessError, match=f"{flag} .*{named}.*{complaint}"):
            process.run(configurations.choices, **args, **TWO_STAGES, **{option: named})


def test_one_stage_takes_any_scheduler(process: EngineProcess, args: dict[str, Any]) -> None:
    named = "user_classes.ForeignScheduler"
    assert process.run(configurations.choices, **args, **OURS, scheduler_cls=named)["scheduler"] == named


def test_an_executor_that_does_not_exist(process: EngineProcess, args: dict[str, Any]) -> None:
    with pytest.raises(EngineProcessError, match=f"does not exist .*The executor is {EXECUTOR}"):
        process.run(configurations.choices, **args, **{**TWO_STAGES, "distributed_executor_backend": f"{EXECUTOR}Typo"})


def test_other_backends_are_untouched(new_process: NewProcess, args: dict[str, Any]) -> None:
    backends: list[dict[str, Any]] = [
        {"distributed_executor_backend": "mp"},
        {"distributed_executor_backend": "mp", "pipeline_parallel_size": 2},
        {"distributed_executor_backend": "uni"},
        {"distributed_executor_backend": "external_launcher"},
        {},
    ]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # or "uni" would become "mp"
    with_plugin, without = new_process(**environment), new_process(**environment, **WITHOUT_PLUGIN)
    # The plugin is at work in the one process and not in the other.
    assert with_plugin.run(configurations.choices, **args, **TWO_STAGES)["worker"] == CPU_WORKER
    with pytest.raises(EngineProcessError):
        without.run(configurations.choices, **args, **TWO_STAGES)
    for backend in backends:
        found, again = (with_plugin.run(configurations.plain, **args, **backend) for _ in range(2))
        wanted = without.run(configurations.plain, **args, **backend)
        # Random with every configuration.
        random = {path for path in found if found[path] != again.get(path)}
        assert random <= {".instance_id", ".parallel_config.data_parallel_master_port"}
        different = {p: (found.get(p), wanted.get(p)) for p in found.keys() | wanted.keys() if p not in random}
        assert {path: pair for path, pair in different.items() if pair[0] != pair[1]} == {}
        assert len(found) > 300


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({"runner": "pooling"}, "pooling models"),
        ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, "KV connectors .*"),
    ],
)
def test_refused_with_more_than_one_stage(
    process: EngineProcess, args: dict[str, Any], more: dict[str, Any], what: str
) -> None:
    with pytest.raises(EngineProcessError, match=f"vllm-handoff does not run {what} with pipeline parallelism yet: "):
        process.run(configurations.create, **args, **TWO_STAGES, **more)


def test_drafts_with_stages_need_asynchronous_scheduling(process: EngineProcess, args: dict[str, Any]) -> None:
    more = {"speculative_config": {"method": "ngram_gpu", "num_speculative_tokens": 2}}
    process.run(configurations.create, **args, **TWO_STAGES, **more)
    with pytest.raises(EngineProcessError, match="and synchronous scheduling yet: drop --no-async-scheduling"):
        process.run(configurations.create, **args, **TWO_STAGES, **more, async_scheduling=False)


def test_the_v1_runner_is_refused(new_process: NewProcess, args: dict[str, Any]) -> None:
    with pytest.raises(EngineProcessError, match="does not run the V1 model runner yet: unset VLLM_USE_V2"):
        new_process(VLLM_USE_V2_MODEL_RUNNER="0").run(configurations.create, **args, **TWO_STAGES)


def _configuration(stages: int = 2, **different: Any) -> SimpleNamespace:
    """What check_supported looks at, all of it supported; `different` are paths with two underscores for a dot."""
    config = SimpleNamespace(
        use_v2_model_runner=True,
        speculative_config=None,
        scheduler_config=SimpleNamespace(async_scheduling=True),
        kv_transfer_config=None,
        ec_transfer_config=None,
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=stages,
            nnodes=1,
            data_parallel_size=1,
            prefill_context_parallel_size=1,
            decode_context_parallel_size=1,
            enable_batch_sharded_sampling=False,
        ),
        watermark_config=None,
        device_config=SimpleNamespace(device_type="cuda"),
        model_config=SimpleNamespace(
            runner_type="generate",
            is_encoder_decoder=False,
            is_diffusion=False,
            is_moe=False,
            is_hybrid=False,
            has_inner_state=False,
        ),
    )
    for path, value in different.items():
        owner: Any = config
        *parents, name = path.split("__")
        for parent in parents:
            owner = getattr(owner, parent)
        assert hasattr(owner, name)
        setattr(owner, name, value)
    return config


def _drafting(method: str) -> SimpleNamespace:
    return SimpleNamespace(
        method=method,
        use_gemma4_mtp=lambda: False,
        use_multi_module_mtp=lambda: False,
        enable_adaptive_verification=False,
    )


REFUSED: dict[str, dict[str, Any]] = {
    "the V1 model runner": {"use_v2_model_runner": False},
    "more than one node": {"parallel_config__nnodes": 2},
    "data parallelism of mixture-of-experts models": {
        "parallel_config__data_parallel_size": 2,
        "model_config__is_moe": True,
    },
    "context parallelism": {"parallel_config__decode_context_parallel_size": 2},
    "speculative decoding by this method with pipeline parallelism": {"speculative_config": _drafting("dflash")},
    "speculative decoding with pipeline parallelism and synchronous scheduling": {
        "speculative_config": _drafting("ngram"),
        "scheduler_config__async_scheduling": False,
    },
    "pooling models with pipeline parallelism": {"model_config__runner_type": "pooling"},
    "encoder-decoder models with pipeline parallelism": {"model_config__is_encoder_decoder": True},
    "diffusion models with pipeline parallelism": {"model_config__is_diffusion": True},
    "speculative decoding of models with recurrent state (hybrid, Mamba) with pipeline parallelism": {
        "speculative_config": _drafting("ngram_gpu"),
        "model_config__is_hybrid": True,
    },
    "KV connectors other than OffloadingConnector with pipeline parallelism": {
        "kv_transfer_config": SimpleNamespace(kv_connector="NixlConnector")
    },
    "encoder-cache connectors with pipeline parallelism": {"ec_transfer_config": object()},
    "speculative decoding by this method on a CPU": {"speculative_config": _drafting("dflash")},
    "pooling models on a CPU": {"model_config__runner_type": "pooling"},
    "models with recurrent state (hybrid, Mamba) on a CPU": {"model_config__is_hybrid": True},
    "watermarking on a CPU": {"watermark_config": object()},
    "batch-sharded sampling on a CPU": {"parallel_config__enable_batch_sharded_sampling": True},
}
ALL = ALWAYS + WITH_STAGES + ON_A_CPU


def test_every_refusal_has_its_case_here() -> None:
    assert set(REFUSED) == {refusal.what for refusal in ALL}
    check_supported(_configuration())
    check_supported(_configuration(parallel_config__data_parallel_size=2))
    check_supported(_configuration(kv_transfer_config=SimpleNamespace(kv_connector="OffloadingConnector")))


@pytest.mark.parametrize("what", REFUSED)
def test_refusals(what: str) -> None:
    case = REFUSED[what]
    (refusal,) = (refusal for refusal in ALL if refusal.what == what)
    if refusal in ON_A_CPU:
        check_supported(_configuration(stages=1, **case))
        case = {"stages": 1, "device_config__device_type": "cpu", **case}
    with pytest.raises(UnsupportedFeatureError) as caught:
        check_supported(_configuration(**case))
    assert str(caught.value) == f"vllm-handoff does not run {what} yet: {refusal.remedy}."
    if what in {refusal.what for refusal in WITH_STAGES}:
        check_supported(_configuration(stages=1, **case))


@pytest.mark.parametrize(
    "more",
    [{**TWO_STAGES, "distributed_executor_backend": "class"}, OURS],
    ids=["class, two stages", "path, one stage"],
)
def test_without_the_plugin(new_process: NewProcess, args: dict[str, Any], more: dict[str, Any]) -> None:
    process = new_process(VLLM_ENABLE_V1_MULTIPROCESSING="0", **WITHOUT_PLUGIN)
    message = (
        "HandoffExecutor needs the vLLM plugin 'vllm_handoff', which is not loaded: "
        "VLLM_PLUGINS='lora_filesystem_resolver' leaves it out: add vllm_handoff to VLLM_PLUGINS, or unset it."
    )
    with pytest.raises(EngineProcessError, match=message):
        process.run(configurations.start_any, **args, **more)
    assert process.children() == set()


@pytest.mark.parametrize("more", [OURS, TWO_STAGES], ids=["one stage", "two stages"])
@pytest.mark.parametrize("number", ["0.31.2", "0.33.0", "1.0.0"])
def test_another_vllm(new_process: NewProcess, args: dict[str, Any], number: str, more: dict[str, Any]) -> None:
    process = new_process(VLLM_ENABLE_V1_MULTIPROCESSING="0")
    process.run(configurations.pretend_vllm_is, number)
    message = (
        f"UnsupportedVllmError: vLLM {number} is installed, and this vllm-handoff works with vLLM 0.32.x only. "
        r"Install a supported one \(pip install 'vllm==0.32.\*'\)"
    )
    with pytest.raises(EngineProcessError, match=message):
        process.run(configurations.start_any, **args, **more)
    assert process.children() == set()
    # Nobody who does not use the executor notices.
    assert process.run(configurations.choices, **args, distributed_executor_backend="mp")["scheduler"] is None
