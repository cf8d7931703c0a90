"""Boards and the metrics made of them: what is written in one process is what another reads."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from vllm_handoff.executor import board, metrics
from vllm_handoff.executor.board import Board, BoardReader, Phase, WorkerCounts, worker_board
from vllm_handoff.executor.host_pace import HostPace
from vllm_handoff.executor.stats import STALL_NS, RoundStats, StageProgress
from vllm_handoff.worker import device_clock, device_progress, work_clock
from vllm_handoff.worker.device_clock import DeviceClock
from vllm_handoff.worker.device_progress import DeviceProgress
from vllm_handoff.worker.recorder import Mark, RecordedWork, Recorder, work_of
from vllm_handoff.worker.work_clock import WorkClock


def test_a_reader_sees_what_was_written_last_and_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / "board"
    counts = RoundStats(depth=4)
    writer = Board(path, counts)
    reader = BoardReader(path, RoundStats)
    counts.sent(1)
    writer.write(counts)
    path.unlink()
    assert reader.read() == counts and reader.read().in_flight == 1
    assert path.stat().st_mode & 0o77 == 0 if path.exists() else True


def test_a_board_of_another_type_is_refused(tmp_path: Path) -> None:
    Board(tmp_path / "board", WorkerCounts())
    with pytest.raises(ValueError, match="not a board of RoundStats"):
        BoardReader(tmp_path / "board", RoundStats)


def test_writing_costs_next_to_nothing(tmp_path: Path) -> None:
    writer, counts = Board(tmp_path / "board", RoundStats()), RoundStats()
    start = time.perf_counter()
    for _ in range(10000):
        writer.write(counts)
    # Measured: 1 us. The bound only catches a system call that sneaks in, on a busy machine.
    assert (time.perf_counter() - start) / 10000 < 50e-6


def test_a_stall_is_counted_once_and_idleness_is_none() -> None:
    stats = RoundStats()
    assert stats.quiet_ns(10**15) == 0
    stats.sent(10**15)
    assert stats.quiet_ns(10**15 + 5) == 5
    stats.answered(10**15, 10**15 + 2 * STALL_NS)
    stats.sent(10**16)
    stats.answered(10**16, 10**16 + 7)
    assert (stats.stalls, stats.completed, stats.in_flight) == (1, 2, 0)
    assert stats.round_ns == 2 * STALL_NS + 7


def test_a_worker_tells_work_from_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000
    monkeypatch.setattr(work_clock.time, "monotonic_ns", lambda: now)
    published: list[tuple[int, int]] = []
    clock = WorkClock(lambda counts: published.append((counts.phase, counts.phase_ns)))
    now = 1100
    clock.begin(Phase.FORWARD, 7, sent_ns=1090)  # it was waiting: the way took 10
    now = 1110
    with clock.waiting(Phase.HOP):
        now = 1140
    with clock.waiting(Phase.SEND):
        now = 1150  # a peer that takes its time: not told apart from work
    clock.enter(Phase.SAMPLING)
    clock.launched(7)
    now = 1180
    clock.end(is_round=True)
    clock.device_finished(7)
    now = 1185
    clock.begin(Phase.FORWARD, 8, sent_ns=1150)  # sent while it worked: says nothing of the way
    assert published[:8] == [
        (Phase.COMMAND, 1000),
        (Phase.FORWARD, 1100),
        (Phase.HOP, 1110),
        (Phase.FORWARD, 1140),
        (Phase.SEND, 1140),
        (Phase.FORWARD, 1150),
        (Phase.SAMPLING, 1150),
        (Phase.SAMPLING, 1150),
    ]
    assert msgspec.structs.asdict(clock.counts) == {
        "rounds": 1,
        "working": 1,
        "since_ns": 1185,
        "busy_ns": 50,
        "idle_ns": 105,
        "hop_wait_ns": 30,
        "handoff_wait_ns": 0,
        "deliveries": 1,
        "delivery_ns": 10,
        "on_device": 0,
        "device_busy_ns": 0,
        "device_idle_ns": 0,
        "device_hop_wait_ns": 0,
        "device_handoff_wait_ns": 0,
        "phase": Phase.FORWARD,
        "phase_ns": 1185,
        "round": 8,
        "launched": 7,
        "device_round": 7,
        "output_round": -1,
        "launch_ns": 0,
    }


def test_a_hosts_usual_time_survives_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0
    monkeypatch.setattr(work_clock.time, "monotonic_ns", lambda: now)
    clock = WorkClock()

    def serve(ms: int, decodes: bool = True) -> None:
        nonlocal now
        now += 7_000_000  # waiting for the command counts for nothing
        clock.begin(Phase.FORWARD, 1)
        if decodes:
            clock.only_decodes()
        now += ms * 1_000_000
        clock.end(is_round=True)

    serve(50)  # the first has kernels to load
    for _ in range(200):
        serve(2)
        serve(40, decodes=False)
    assert 1_990_000 <= clock.counts.launch_ns <= 2_010_000
    serve(3000)
    assert clock.counts.launch_ns < 2_200_000


def test_the_pace_is_the_slowest_hosts(tmp_path: Path) -> None:
    boards = [Board(worker_board(str(tmp_path), rank), WorkerCounts()) for rank in range(2)]
    pace = HostPace(str(tmp_path), 2)
    assert pace.seconds() == 0
    for writer, ns in zip(boards, (3_000_000, 2_000_000), strict=True):
        writer.write(WorkerCounts(launch_ns=ns))
    assert pace.seconds() == pytest.approx(3e-3)
    assert pickle.loads(pickle.dumps(pace)).seconds() == pytest.approx(3e-3)


class Stream:
    """A device that reaches what is launched on it in its own time, in ms."""

    def __init__(self) -> None:
        self.launched: list[Event] = []
        self.events = 0

    def event(self) -> Event:
        self.events += 1
        return Event(self)

    def reach(self, *times: float) -> None:
        """The device passes the next launched events at these times."""
        for at in times:
            self.launched.pop(0).at = at


class Event:
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.at: float | None = None

    def record(self, stream: object) -> None:
        self.at = None
        self._stream.launched.append(self)

    def query(self) -> bool:
        return self.at is not None

    def elapsed_time(self, later: Event) -> float:
        assert self.at is not None and later.at is not None, "read before the device was there"
        return later.at - self.at


def test_a_devices_time_is_read_only_when_it_has_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    spent: dict[str, float] = {}
    monkeypatch.setattr(work_clock, "device_ns", spent)
    monkeypatch.setattr(device_clock, "current_stream", lambda device: None)
    monkeypatch.setattr(device_progress, "current_stream", lambda device: None)
    stream = Stream()
    progress = DeviceProgress(torch.device("cuda", 0))
    monkeypatch.setattr(progress, "_thread", object())  # this test looks by itself
    clock = progress.clock = DeviceClock(torch.device("cuda", 0), stream.event)
    stream.reach(100)
    clock.mark(Mark.HANDOFF)  # warm-up: outside of a round
    assert clock.end() is None
    clock.begin()
    clock.mark(Mark.HANDOFF)
    clock.mark(Mark.FORWARD)
    progress.launched(1, clock.end())
    stream.reach(103, 105)  # it has begun the round, and not ended it
    clock.begin()
    assert progress.look()
    assert spent == {"busy": 0, "idle": 0, "hop": 0, "handoff": 0}
    clock.mark(Mark.HOP_WAIT)
    clock.mark(Mark.HOP)
    progress.launched(2, clock.end())
    stream.reach(112, 112, 113, 117, 120)
    assert not progress.look()
    assert spent == {"busy": 7e6 + 1e6 + 3e6, "idle": 3e6, "hop": 4e6, "handoff": 2e6}
    for number in range(3, 103):
        clock.begin()
        progress.launched(number, clock.end())
        stream.reach(120, 120)
        progress.look()
    assert stream.events <= 12, "events are used again"
    # What the board says of it.
    counts = WorkClock()
    counts.begin(Phase.FORWARD, 1)
    counts.end(is_round=True)
    assert (counts.counts.on_device, counts.counts.device_busy_ns, counts.counts.device_hop_wait_ns) == (1, 11e6, 4e6)


def test_the_work_of_a_round_is_told_from_its_schedule() -> None:
    output = SimpleNamespace(
        num_scheduled_tokens={"a": 1, "b": 1, "c": 300, "new": 200},
        scheduled_cached_reqs=SimpleNamespace(req_ids=["a", "b", "c"], num_computed_tokens=[10, 20, 1000]),
        scheduled_new_reqs=[SimpleNamespace(req_id="new", num_computed_tokens=0)],
    )
    assert work_of(output) == RecordedWork(decodes=2, context=32, prompt_context=300 * 1150 + 200 * 100)


def test_marks_reach_the_clock_whether_or_not_they_are_recorded() -> None:
    passed: list[Any] = []

    class Clock:
        def begin(self) -> None:
            passed.append("begin")

        def mark(self, mark: Mark) -> None:
            passed.append(mark)

        def end(self) -> None:
            passed.append("end")

    recorder = Recorder(torch.device("cpu"))
    recorder.clock = Clock()  # type: ignore[assignment]
    for on in (False, True):
        if on:
            recorder.start()
        recorder.begin(7, 1, 1)
        recorder.mark(Mark.HOP)
        recorder.end()
    assert passed == ["begin", Mark.HOP, "end"] * 2
    (recorded,) = recorder.stop()
    assert [at is not None for at in recorded.marks] == [True, False, False, True, False, True]


def _samples(collector: metrics.HandoffCollector) -> dict[str, Any]:
    return {
        sample.name.removeprefix("vllm_handoff_") + "".join(sample.labels.get(k, "") for k in ("rank", "reason")): (
            sample.value
        )
        for metric in collector.collect()
        for sample in metric.samples
    }


def test_the_collector_reads_the_boards_of_its_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board.tempfile, "gettempdir", lambda: str(tmp_path))
    collector = metrics.HandoffCollector("4711", ranks=2, ranks_per_stage=1, labels={"model_name": "m", "engine": "0"})
    assert _samples(collector) == {}
    folder = tmp_path / "vllm-handoff-abc"
    folder.mkdir()
    now = time.monotonic_ns()
    for rank in range(2):
        Board(board.worker_board(str(folder), rank), WorkerCounts(rounds=3, since_ns=now - 10**9))
    stats = RoundStats(
        rounds=5, completed=3, in_flight=2, depth=4, handoff_bytes=80, progress_ns=now - 2 * STALL_NS,
        engine_ns=7_500_000_000,
    )  # fmt: skip
    Board(folder / board.ENGINE_BOARD, stats)
    board.announce(str(folder), "4711")
    found = _samples(collector)
    assert (found["rounds_total"], found["rounds_in_flight"], found["handoff_bytes_total"]) == (5, 2, 80)
    assert found["engine_busy_seconds_total"] == pytest.approx(7.5)
    # Alive but not advancing.
    assert found["stalled"] == 1 and found["stalls_total"] == 1 and found["seconds_without_progress"] >= 20
    # One long round, in which a stage advances.
    Board(folder / board.STAGES_BOARD, StageProgress(now - STALL_NS // 10))
    with_stages = metrics.HandoffCollector(
        "4711", ranks=2, ranks_per_stage=1, labels={"model_name": "m", "engine": "0"}
    )
    advancing = _samples(with_stages)
    assert advancing["stalled"] == 0 and advancing["stalls_total"] == 1
    assert 1 <= advancing["seconds_without_progress"] < 10
    assert found["stage_rounds_total1"] == 3 and 1 <= found["stage_waiting_seconds_total0command"] < 60


def test_replicas_share_their_metrics_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may stand once in what Prometheus is given, its samples side by side."""
    from prometheus_client import CollectorRegistry, generate_latest

    monkeypatch.setattr(board.tempfile, "gettempdir", lambda: str(tmp_path))
    collectors = []
    for index in range(2):
        folder = tmp_path / f"vllm-handoff-{index}"
        folder.mkdir()
        Board(board.worker_board(str(folder), 0), WorkerCounts(rounds=3))
        Board(folder / board.ENGINE_BOARD, RoundStats(rounds=5 + index))
        board.announce(str(folder), board.engine_name("4711", index))
        labels = {"model_name": "m", "engine": str(index)}
        collectors.append(metrics.HandoffCollector(board.engine_name("4711", index), 1, 1, labels))
    registry = CollectorRegistry()
    registry.register(metrics.EnginesCollector(collectors))  # type: ignore[arg-type]
    lines = generate_latest(registry).decode().splitlines()
    types = [line for line in lines if line.startswith("# TYPE")]
    assert len(types) == len(set(types)) > 10
    assert [line for line in lines if line.startswith("vllm_handoff_rounds_total{")] == [
        'vllm_handoff_rounds_total{engine="0",model_name="m"} 5.0',
        'vllm_handoff_rounds_total{engine="1",model_name="m"} 6.0',
    ]


def test_registries_of_several_processes_have_the_newest_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prometheus_client import CollectorRegistry, multiprocess
    from prometheus_client.core import GaugeMetricFamily

    class Engine:
        def __init__(self, name: str) -> None:
            self.name = name

        def describe(self) -> list[Any]:
            return []

        def collect(self) -> list[Any]:
            return [GaugeMetricFamily(self.name, "text", value=1)]

    monkeypatch.setattr(multiprocess.MultiProcessCollector, "__init__", multiprocess.MultiProcessCollector.__init__)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    for name in ("earlier", "newest"):
        metrics._join_registries_of_several_processes(Engine(name))  # type: ignore[arg-type]
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    assert [metric.name for metric in registry.collect()] == ["newest"]


def test_a_gpus_stage_has_its_devices_times_and_counters_never_go_back() -> None:
    collector = metrics.HandoffCollector("1", ranks=1, ranks_per_stage=1, labels={"model_name": "m", "engine": "0"})

    def times(counts: WorkerCounts, now: int) -> dict[str, float]:
        found = collector._worker_metrics([counts], now)
        return {
            sample.name.removeprefix("vllm_handoff_") + sample.labels.get("reason", ""): sample.value * 1e9
            for metric in found
            for sample in metric.samples
        }

    counts = WorkerCounts(
        on_device=1, busy_ns=5, device_busy_ns=50, device_idle_ns=7, device_hop_wait_ns=3, device_handoff_wait_ns=2,
        launch_ns=9,
    )  # fmt: skip
    counts.working, counts.since_ns = 0, 1000
    found = times(counts, now=1020)
    assert (found["stage_busy_seconds_total"], found["host_busy_seconds_total"]) == pytest.approx((50, 5))
    assert found["host_round_seconds"] == pytest.approx(9)
    waits = [found[f"stage_waiting_seconds_total{reason}"] for reason in ("command", "hop", "handoff")]
    assert waits == pytest.approx([7 + 20, 3, 2])
    # A round came, and the device says now that it was busy for half of that time.
    counts.working, counts.since_ns, counts.device_idle_ns = 1, 1021, 17
    assert times(counts, now=1030)["stage_waiting_seconds_totalcommand"] == pytest.approx(27)
    counts.device_idle_ns = 40
    assert times(counts, now=1040)["stage_waiting_seconds_totalcommand"] == pytest.approx(40)


def test_another_executor_gets_no_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.metrics.loggers import StatLoggerManager

    from vllm_handoff.executor import plugin

    plugin.register()
    published: list[Any] = []
    monkeypatch.setattr(metrics, "publish", lambda config, engines: published.append((config, engines)))

    class Config:
        def __init__(self, backend: str) -> None:
            self.parallel_config = type("Parallel", (), {"distributed_executor_backend": backend})()

    # The loggers themselves need a whole configuration: here they may fail before, never after, our part.
    wrapped = StatLoggerManager.__init__
    original = wrapped.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        original, "__code__", (lambda self, vllm_config, *a, **k: setattr(self, "engine_indexes", [0, 1])).__code__
    )
    for backend in ("mp", "ray", "vllm_handoff.executor.HandoffExecutor"):
        wrapped(object.__new__(StatLoggerManager), Config(backend))
    assert [(config.parallel_config.distributed_executor_backend, engines) for config, engines in published] == [
        ("vllm_handoff.executor.HandoffExecutor", [0, 1])
    ]
