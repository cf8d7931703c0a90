"""HandoffExecutor: every method of vLLM's executor interface reaches the workers and comes back."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

import vllm_handoff.executor
from fake_worker import FakeWorker, SchedulerOutput, control_plane

pytestmark = pytest.mark.timeout(180)

# What a real worker returns where the executor looks into it.
RESULTS: dict[str, Any] = {
    "add_lora": True,
    "remove_lora": True,
    "pin_lora": True,
    "list_loras": {1, 2},
    "supports_draft_weight_updates": True,
    "get_supported_tasks": ("generate",),
    "determine_available_memory": 123,
    "compile_or_warm_up_model": SimpleNamespace(language_model=1.5, encoder=0.5),
    "check_health": None,
}


class EveryMethod(FakeWorker):
    """Has every method: returns what RESULTS says, or the arguments."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "device":
            raise AttributeError(name)

        def method(*args: Any, **kwargs: Any) -> Any:
            self.log.append((name, args, kwargs))
            return RESULTS.get(name)

        return method

    def sleep(self, level: int = 1) -> None:  # type: ignore[override]
        self.log.append(("sleep", (), {"level": level}))


@pytest.fixture(scope="module")
def executor_class() -> type:
    found = vllm_handoff.executor.HandoffExecutor
    # vLLM and torch are a million objects; the collections around each test need not look at them.
    gc.freeze()
    return found


@pytest.fixture
def executor(executor_class: type) -> Iterator[Any]:
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    from vllm_handoff.executor.rounds import RoundDispatcher

    with control_plane(worker_class=EveryMethod) as plane:
        made = object.__new__(executor_class)
        made._plane = plane
        made._output_rank = 1
        made._rounds = RoundDispatcher(plane, 1, True, EMPTY_MODEL_RUNNER_OUTPUT, 60)
        made._stats_written = False
        made.sleeping_tags = set()
        made.kv_output_aggregator = made.ec_output_aggregator = None
        made.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace())
        made.parallel_config = SimpleNamespace(world_size=2, pipeline_parallel_size=1)
        yield made


def called(executor: Any) -> list[tuple]:
    """What the workers were called with since the last look, which must be the same on both."""
    logs = executor._plane.call(lambda worker: [worker.log[:], worker.log.clear()][0]).result()
    assert logs[0] == logs[1]
    return logs[0]


def test_class(executor_class: type) -> None:
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    assert issubclass(executor_class, Executor) and not issubclass(executor_class, MultiprocExecutor)
    assert executor_class.supports_pp and executor_class.supports_async_scheduling()  # type: ignore[attr-defined]
    assert not inspect.isabstract(executor_class)


LORA = SimpleNamespace(lora_int_id=3)


@pytest.mark.parametrize(
    ("method", "args", "worker_call", "result"),
    [
        ("initialize_from_config", (["k0", "k1"],), ("initialize_from_config", (["k0", "k1"],), {}), None),
        ("compile_or_warm_up_model", (), ("compile_or_warm_up_model", (), {}), None),
        ("determine_available_memory", (), ("determine_available_memory", (), {}), [123, 123]),
        ("get_kv_cache_specs", (), ("get_kv_cache_spec", (), {}), [None, None]),
        ("get_supported_kv_cache_layouts", (), ("get_supported_kv_cache_layouts", (), {}), [None, None]),
        ("set_kv_cache_layout", ("NHD",), ("set_kv_cache_layout", ("NHD",), {}), None),
        ("get_kv_connector_handshake_metadata", (), ("get_kv_connector_handshake_metadata", (), {}), [None, None]),
        ("execute_dummy_batch", (), ("execute_dummy_batch", (), {}), None),
        ("take_draft_token_ids", (), ("take_draft_token_ids", (), {}), None),
        ("profile", (True, "p"), ("profile", (True, "p"), {}), None),
        (
            "save_sharded_state",
            ("/x",),
            ("save_sharded_state", (), {"path": "/x", "pattern": None, "max_size": None}),
            None,
        ),
        ("supports_draft_weight_updates", (), ("supports_draft_weight_updates", (), {}), True),
        ("add_lora", (LORA,), ("add_lora", (LORA,), {}), True),
        ("remove_lora", (3,), ("remove_lora", (3,), {}), True),
        ("pin_lora", (3,), ("pin_lora", (3,), {}), True),
        ("list_loras", (), ("list_loras", (), {}), {1, 2}),
        ("reset_mm_cache", (), ("reset_mm_cache", (), {}), None),
        ("reset_encoder_cache", (), ("reset_encoder_cache", (), {}), None),
        ("sleep", (2,), ("sleep", (), {"level": 2}), None),
        ("discard", (("kv_cache",),), ("discard", (("kv_cache",),), {}), None),
        ("check_health", (), ("check_health", (), {}), None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_methods_reach_every_worker(executor: Any, method: str, args: tuple, worker_call: tuple, result: Any) -> None:
    assert getattr(executor, method)(*args) == result
    assert called(executor) == [worker_call]


def test_compilation_times_come_back(executor: Any) -> None:
    executor.compile_or_warm_up_model()
    assert executor.vllm_config.compilation_config.compilation_time == 1.5


def test_sleep_and_wake_up(executor: Any) -> None:
    executor.sleep()
    assert executor.is_sleeping
    executor.wake_up()
    assert not executor.is_sleeping
    assert [entry[0] for entry in called(executor)] == ["sleep", "wake_up"]


def test_supported_tasks(executor: Any) -> None:
    assert executor.supported_tasks == ("generate",)


def test_collective_rpc(executor: Any) -> None:
    assert executor.collective_rpc("add", args=(1,), kwargs={"b": 1}) == [2, 3]
    assert executor.collective_rpc("add", args=(1,), unique_reply_rank=1) == 2
    future = executor.collective_rpc("add", args=(1,), non_block=True)
    assert isinstance(future, Future) and future.result() == [1, 2]
    with pytest.raises(RuntimeError, match="fail_on"):
        executor.collective_rpc("fail_on", args=(1,))
    with pytest.raises(TimeoutError, match="within 0.1 s"):
        executor.collective_rpc(lambda worker: FakeWorker.sleep(worker, 1.0), timeout=0.1)


def test_rounds_blocking_and_not(executor: Any) -> None:
    assert executor.execute_model(SchedulerOutput(note=0)) is None
    assert executor.sample_tokens(None)["note"] == 0
    assert executor.execute_model(SchedulerOutput(note=1), non_block=True).result() is None
    assert executor.sample_tokens(None, non_block=True).result()["note"] == 1
    assert executor.execute_model(SchedulerOutput(0, note=2))["note"] == 2


def test_both_aggregators_see_all_ranks(executor: Any) -> None:
    class Aggregator:
        def aggregate(self, outputs: list[dict], output_rank: int) -> dict:
            outputs[output_rank].setdefault("seen", []).append([output["rank"] for output in outputs])
            return outputs[output_rank]

    executor.kv_output_aggregator = executor.ec_output_aggregator = Aggregator()
    executor.execute_model(SchedulerOutput(note=0))
    assert executor.sample_tokens(None)["seen"] == [[0, 1], [0, 1]]


def test_stats_are_written_at_shutdown(executor: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HANDOFF_STATS_FILE", str(tmp_path / "stats.json"))
    executor.execute_model(SchedulerOutput(4))
    executor.sample_tokens(None)
    executor.shutdown()
    executor.shutdown()
    written = msgspec.json.decode((tmp_path / "stats.json").read_bytes())
    assert written["rounds"] == 1 and written["tokens"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["stats.json"]


def test_importing_the_package_does_not_import_vllm() -> None:
    code = (
        "import sys, vllm_handoff.executor, vllm_handoff.worker.process; "
        "print('vllm' in sys.modules, 'torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]


def test_workers_are_asked_for_an_adapter_once_and_again_if_it_is_gone(executor_class: type, tmp_path: Any) -> None:
    asked: list[str] = []
    executor = object.__new__(executor_class)
    executor._adapters = {}
    executor.add_lora = lambda request: asked.append(request.lora_path)

    def load(number: int, path: str, again: bool = False) -> int:
        executor.load_adapter(SimpleNamespace(lora_int_id=number, lora_path=path, load_inplace=again))
        return len(asked)

    folder = tmp_path / "adapter"
    folder.mkdir()
    assert [load(1, str(folder)), load(1, str(folder))] == [1, 1]
    assert [load(2, "some/hub-name"), load(2, "some/hub-name")] == [2, 2]
    assert load(1, str(folder), again=True) == 3
    assert load(1, str(tmp_path)) == 4, "the same number for another adapter"
    assert load(1, str(folder)) == 5
    folder.rmdir()
    assert load(1, str(folder)) == 6
