"""Prometheus metrics on vLLM's own /metrics, with the prefix `vllm_handoff_`.

A collector in the API server's process looks at the engine's boards whenever
somebody asks for metrics; nothing happens between. vLLM's own interface for
statistics, the plugin group `vllm.stat_logger_plugins`, does not do: an
installed stat logger switches statistics on for every engine, also under
--disable-log-stats and with other executors, and it is called only when a
round's output arrives, so that an engine that is stuck would look healthy.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vllm_handoff.executor.board import (
    ENGINE_BOARD,
    STAGES_BOARD,
    BoardReader,
    WorkerCounts,
    engine_name,
    find_folder,
    sibling_name,
    worker_board,
)
from vllm_handoff.executor.stats import STALL_NS, RoundStats, StageProgress

# name, help, field of RoundStats: counters get "_total" from the Prometheus client.
_COUNTERS = (
    ("rounds", "Rounds sent to the workers.", "rounds"),
    ("rounds_completed", "Rounds whose output has come back.", "completed"),
    ("rounds_not_dispatched", "Rounds without work for any worker.", "rounds_not_dispatched"),
    ("handoffs", "Rounds whose sampled tokens go from the last stage to the first.", "handoffs"),
    ("handoffs_skipped", "Rounds with tokens whose samples no later round reads.", "handoffs_not_needed"),
    ("handoff_bytes", "Bytes handed off, to each receiving worker.", "handoff_bytes"),
    ("scheduled_tokens", "Tokens scheduled, prompts included.", "tokens"),
    ("faults", "Failures that ended the executor.", "faults"),
)
_GAUGES = (
    ("rounds_in_flight", "Rounds sent and not yet answered.", "in_flight"),
    ("rounds_in_flight_max", "The most rounds in flight at once since the start.", "max_in_flight"),
    ("depth", "Rounds that may be in flight.", "depth"),
)
_NS = 1e-9
# On a function of ours that stands for another's: that one.
_ORIGINAL = "_vllm_handoff_original"


class HandoffCollector:
    """Reads the boards of one engine.

    Args:
        name: under which the engine's boards can be found (see board.announce).
        ranks_per_stage: workers a stage.
        ranks: workers in all.
        labels: names and values that every metric carries.
    """

    def __init__(self, name: str, ranks: int, ranks_per_stage: int, labels: dict[str, str]) -> None:
        self._name = name
        self._ranks = ranks
        self._ranks_per_stage = ranks_per_stage
        self._names = list(labels)
        self._values = list(labels.values())
        self._engine: BoardReader[RoundStats] | None = None
        self._workers: list[BoardReader[WorkerCounts]] = []
        self._stages: BoardReader[StageProgress] | None = None
        self._idle_seen: dict[int, int] = {}

    def _open(self) -> bool:
        """Whether the boards are there. Workers make theirs before the engine says that it is ready."""
        if self._engine is not None:
            return True
        folder = find_folder(self._name)
        if folder is None:
            return False
        try:
            workers = [BoardReader(worker_board(str(folder), rank), WorkerCounts) for rank in range(self._ranks)]
            self._engine = BoardReader(folder / ENGINE_BOARD, RoundStats)
        except (OSError, ValueError):
            return False
        with contextlib.suppress(OSError):
            # Not there if nobody looks for stalls.
            self._stages = BoardReader(folder / STAGES_BOARD, StageProgress)
        self._workers = workers
        return True

    def describe(self) -> Iterable[Any]:
        """Nothing, so that registering does not collect."""
        return ()

    def collect(self) -> Iterator[Any]:
        if not self._open():
            return
        assert self._engine is not None
        now = time.monotonic_ns()
        yield from self._engine_metrics(self._engine.read(), now)
        yield from self._worker_metrics([board.read() for board in self._workers], now)

    def _engine_metrics(self, stats: RoundStats, now: int) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(f"vllm_handoff_{name}", text, labels=self._names)
            counter.add_metric(self._values, getattr(stats, field))
            yield counter
        engine = CounterMetricFamily(
            "vllm_handoff_engine_busy_seconds",
            "Processor time of the engine's thread, which schedules and collects: near 1 a second, it sets the pace.",
            labels=self._names,
        )
        engine.add_metric(self._values, stats.engine_ns * _NS)
        yield engine
        since_a_round = quiet = stats.quiet_ns(now)
        if self._stages is not None:
            # A round that takes long is no lack of progress as long as a stage advances in it.
            quiet = min(quiet, max(0, now - self._stages.read().advanced_ns))
        stalled = quiet > STALL_NS
        stalls = CounterMetricFamily(
            "vllm_handoff_stalls",
            f"Times that rounds were in flight and none completed for {STALL_NS * _NS:g} s.",
            labels=self._names,
        )
        stalls.add_metric(self._values, stats.stalls + (since_a_round > STALL_NS))
        yield stalls
        for name, text, value in (
            *((name, text, float(getattr(stats, field))) for name, text, field in _GAUGES),
            (
                "seconds_without_progress",
                "Seconds since the rounds in flight, or a stage within one, last advanced; 0 without any.",
                quiet * _NS,
            ),
            ("stalled", "1 while the engine is alive but its rounds do not advance.", float(stalled)),
        ):
            gauge = GaugeMetricFamily(f"vllm_handoff_{name}", text, labels=self._names)
            gauge.add_metric(self._values, value)
            yield gauge
        seconds = SummaryMetricFamily(
            "vllm_handoff_round_seconds", "From a round's sending to its output.", labels=self._names
        )
        seconds.add_metric(self._values, count_value=stats.completed, sum_value=stats.round_ns * _NS)
        yield seconds

    def _worker_metrics(self, workers: list[WorkerCounts], now: int) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

        names = [*self._names, "stage", "rank"]
        rounds = CounterMetricFamily("vllm_handoff_stage_rounds", "Rounds that a worker has run.", labels=names)
        busy = CounterMetricFamily(
            "vllm_handoff_stage_busy_seconds",
            "Time that a stage's device (a GPU, or the host where the model runs on it) worked.",
            labels=names,
        )
        waiting = CounterMetricFamily(
            "vllm_handoff_stage_waiting_seconds",
            "Time that a stage's device waited for a command, for hidden states (hop) or for sampled tokens (handoff).",
            labels=[*names, "reason"],
        )
        host = CounterMetricFamily(
            "vllm_handoff_host_busy_seconds",
            "Time that a worker's host spent on commands, without waiting for transfers.",
            labels=names,
        )
        delivery = SummaryMetricFamily(
            "vllm_handoff_control_plane_seconds",
            "From the engine's sending of a round to a worker that was waiting for it.",
            labels=names,
        )
        launch = GaugeMetricFamily(
            "vllm_handoff_host_round_seconds",
            "What launching a round that only decodes has taken a worker's host of late; 0 where that is not known.",
            labels=names,
        )
        for rank, counts in enumerate(workers):
            values = [*self._values, str(rank // self._ranks_per_stage), str(rank)]
            rounds.add_metric(values, counts.rounds)
            host.add_metric(values, counts.busy_ns * _NS)
            launch.add_metric(values, counts.launch_ns * _NS)
            busy.add_metric(values, (counts.device_busy_ns if counts.on_device else counts.busy_ns) * _NS)
            for reason, waited in self._waits(rank, counts, now).items():
                waiting.add_metric([*values, reason], waited * _NS)
            delivery.add_metric(values, count_value=counts.deliveries, sum_value=counts.delivery_ns * _NS)
        yield from (rounds, busy, waiting, host, launch, delivery)

    def _waits(self, rank: int, counts: WorkerCounts, now: int) -> dict[str, int]:
        """ns that a stage has waited, by reason."""
        # A wait that goes on belongs to the sum, or it would show only once it is over. (A command
        # under way does not: part of it may turn out to be waiting, and counters never go back.)
        open_ns = 0 if counts.working else max(0, now - counts.since_ns)
        if not counts.on_device:
            return {
                "command": counts.idle_ns + open_ns,
                "hop": counts.hop_wait_ns,
                "handoff": counts.handoff_wait_ns,
            }
        # The device may have had rounds to do when its host's wait began. That shows later; the sum stands till then.
        idle = self._idle_seen[rank] = max(self._idle_seen.get(rank, 0), counts.device_idle_ns + open_ns)
        return {"command": idle, "hop": counts.device_hop_wait_ns, "handoff": counts.device_handoff_wait_ns}


class EnginesCollector:
    """The collectors of several engines as one: a metric that they share stands once, with the samples of each."""

    def __init__(self, collectors: Sequence[HandoffCollector]) -> None:
        self._collectors = collectors

    def describe(self) -> Iterable[Any]:
        """Nothing, so that registering does not collect."""
        return ()

    def collect(self) -> Iterable[Any]:
        found: dict[str, Any] = {}
        for collector in self._collectors:
            for metric in collector.collect():
                found.setdefault(metric.name, metric)
                if found[metric.name] is not metric:
                    found[metric.name].samples += metric.samples
        return found.values()


def publish(vllm_config: Any, engines: Iterable[int]) -> None:
    """Put metrics of engines into this process's Prometheus registry, in place of earlier engines'.

    With several API servers, each of them answers for the engines that they share.

    Args:
        engines: the data-parallel replicas that this front end has; [0] if there is one engine.
    """
    from prometheus_client import REGISTRY

    for earlier in list(REGISTRY._collector_to_names):
        if isinstance(earlier, EnginesCollector):
            REGISTRY.unregister(earlier)
    parallel = vllm_config.parallel_config
    collectors = []
    for index in engines:
        name = engine_name(vllm_config.instance_id, index)
        if parallel._api_process_count > 1:
            name = sibling_name(index) or name
        collectors.append(
            HandoffCollector(
                name,
                parallel.world_size,
                parallel.tensor_parallel_size * parallel.prefill_context_parallel_size,
                {"model_name": vllm_config.model_config.served_model_name, "engine": str(index)},
            )
        )
    collector = EnginesCollector(collectors)
    REGISTRY.register(collector)
    _join_registries_of_several_processes(collector)


def _join_registries_of_several_processes(collector: EnginesCollector) -> None:
    """Put `collector` into every registry that holds the counts of several processes.

    Why: with several API servers a new registry is made for /metrics, by vLLM
    0.32 and for each request once more by prometheus_fastapi_instrumentator. They hold what
    the Prometheus client has written to files, and no collectors.
    How: the client's collector of these files is what all such registries have, so its making is wrapped.
    Can go: when vLLM asks an executor for its metrics.
    """
    from prometheus_client import multiprocess

    owner: Any = multiprocess.MultiProcessCollector
    original = getattr(owner.__init__, _ORIGINAL, owner.__init__)

    @functools.wraps(original)
    def init(self: Any, registry: Any, *args: Any, **kwargs: Any) -> None:
        original(self, registry, *args, **kwargs)
        if registry is not None:
            registry.register(collector)

    setattr(init, _ORIGINAL, original)
    owner.__init__ = init
