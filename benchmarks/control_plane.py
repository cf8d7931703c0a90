"""The control plane next to vLLM's MessageQueue, in one run: latency, sending, work in the background, idle CPU.

Both sides have two worker processes that answer with what they were sent. vLLM's
side is wired as its mp executor wires it: one shared-memory queue that both
workers read, and a reply queue each. Payloads are the same objects.

  call      an empty call to both workers and both replies
  round     a round of 64 decodes and the last worker's reply. vLLM's executor
            sends two messages and waits for two replies, ours one
  image     a round with an image of 6 MB, as one that admits a multimodal request, and both workers' empty replies
  busy      rounds a second with three in flight while each worker computes for
            a millisecond a round: what a control plane that spins takes from
            the work depends on the number of cores
            The CPU time that a round costs beyond that work, in the engine and
            in a worker, is listed too
  idle      CPU time of all processes together while nothing is asked of them,
            as a share of one core

The two sides take turns, each started anew, and the medians of all turns are
printed. A ratio below 1 says that ours is the faster (for `busy`: above 1).
Latencies are in microseconds.

examples:
  python -m vllm_handoff.benchmarks.control_plane
  python -m vllm_handoff.benchmarks.control_plane --count 20000 --idle-seconds 60
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import psutil

from vllm_handoff.executor.control_plane import ControlPlane
from vllm_handoff.executor.rounds import RoundDispatcher

WORKERS = 2
IN_FLIGHT = 3
BUSY_S = 0.001


def burn(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class Side(Protocol):
    """One of the two control planes."""

    name: str
    messages_a_round: int

    def send(self, what: str, payload: Any, reply_rank: int | None) -> Callable[[], Any]: ...

    def send_image(self) -> Callable[[], Any]: ...

    def pids(self) -> list[int]: ...


@cache
def image() -> Any:
    """Patches of an image of half a megapixel, as vision models get them."""
    import torch

    return torch.rand(1369, 1176)


@dataclass
class ImageRound:
    """What the control plane reads of a SchedulerOutput, and an image."""

    image: Any = field(default_factory=image)
    total_num_scheduled_tokens: int = 1
    has_structured_output_requests: bool = False


class EchoWorker:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def echo(self, payload: Any) -> Any:
        return payload

    def execute_model(self, payload: Any) -> int:
        return 0

    def work(self, payload: Any) -> Any:
        burn(BUSY_S)
        return payload

    def shutdown(self) -> None:
        pass


class Ours:
    name = "vllm-handoff"
    messages_a_round = 1

    def __init__(self) -> None:
        self._plane = ControlPlane(
            WORKERS, 1, EchoWorker, lambda rank: {"rank": rank}, multiprocessing.get_context("fork")
        )
        self._plane.start()
        self._rounds = RoundDispatcher(self._plane, WORKERS - 1, samples=False, empty_output=None, timeout=None)

    def send(self, what: str, payload: Any, reply_rank: int | None) -> Callable[[], Any]:
        future: Future = self._plane.call(what, (payload,), reply_rank=-1 if reply_rank is None else reply_rank)
        return future.result

    def send_image(self) -> Callable[[], Any]:
        # Both reply: these workers do not wait for each other as stages do.
        return self._rounds.execute_model(ImageRound(), aggregate=list).result

    def pids(self) -> list[int]:
        return self._plane.pids

    def close(self) -> None:
        self._plane.close()


def _queue_worker(rank: int, handle: Any, connection: Any) -> None:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    requests, replies = MessageQueue.create_from_handle(handle, rank), MessageQueue(1, 1)
    connection.send(replies.export_handle())
    requests.wait_until_ready()
    replies.wait_until_ready()
    worker = EchoWorker(rank)
    while True:
        what, args, kwargs, reply_rank = requests.dequeue(indefinite=True)
        if what == "end":
            return
        result = getattr(worker, what)(*args, **kwargs)
        if reply_rank is None or reply_rank == rank:
            replies.enqueue((0, result))


class Theirs:
    name = "vLLM MessageQueue"
    messages_a_round = 2

    def __init__(self) -> None:
        from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

        context = multiprocessing.get_context("fork")
        self._requests = MessageQueue(WORKERS, WORKERS)
        handle, self._replies, self._processes, connections = self._requests.export_handle(), [], [], []
        for rank in range(WORKERS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_queue_worker, args=(rank, handle, theirs), daemon=True)
            process.start()
            self._processes.append(process)
            connections.append(ours)
        for connection in connections:
            self._replies.append(MessageQueue.create_from_handle(connection.recv(), 0))
        self._requests.wait_until_ready()
        for replies in self._replies:
            replies.wait_until_ready()

    def send(self, what: str, payload: Any, reply_rank: int | None) -> Callable[[], Any]:
        self._requests.enqueue((what, (payload,), {}, reply_rank))
        expected = self._replies if reply_rank is None else [self._replies[reply_rank]]
        return lambda: [replies.dequeue() for replies in expected]

    def send_image(self) -> Callable[[], Any]:
        return self.send("execute_model", ImageRound(), None)

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid]

    def close(self) -> None:
        self._requests.enqueue(("end", (), {}, None))
        for process in self._processes:
            process.join(timeout=10)
        self._requests.shutdown()
        for replies in self._replies:
            replies.shutdown()


@dataclass
class Measured:
    call_p50: float
    call_p99: float
    call_send: float
    round_p50: float
    round_p99: float
    round_send: float
    image_p50: float
    busy_per_s: float
    busy_cpu_engine: float
    busy_cpu_worker: float
    idle_share: float


def round_payload(requests: int = 64) -> Any:
    """What vLLM's scheduler sends for a round of decodes."""
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    ids = [f"cmpl-{i:032x}-0" for i in range(requests)]
    cached = CachedRequestData(
        req_ids=ids,
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None] * requests,
        num_computed_tokens=[200 + i for i in range(requests)],
        num_output_tokens=[100 + i for i in range(requests)],
    )
    output = SchedulerOutput.make_empty()
    output.scheduled_cached_reqs = cached
    output.num_scheduled_tokens = dict.fromkeys(ids, 1)
    output.total_num_scheduled_tokens = requests
    return output


def percentiles(samples: list[float]) -> tuple[float, float]:
    ordered = sorted(samples)
    return ordered[len(ordered) // 2] * 1e6, ordered[int(len(ordered) * 0.99)] * 1e6


def measure(side: Side, count: int, idle_seconds: float) -> Measured:
    for _ in range(200):
        side.send("echo", None, None)()
    calls, call_sends = _timed(side, count, None, None, 1)
    rounds, round_sends = _timed(side, count, round_payload(), WORKERS - 1, side.messages_a_round)
    images = [_seconds(lambda: side.send_image()()) for _ in range(max(20, count // 50))]
    processes = [psutil.Process(pid) for pid in (os.getpid(), *side.pids())]
    before, many = [_used(process) for process in processes], max(200, count // 4)
    busy = _busy(side, many)
    used = [(_used(process) - at) / many * 1e6 for process, at in zip(processes, before)]
    return Measured(
        *percentiles(calls),
        statistics.median(call_sends) * 1e6,
        *percentiles(rounds),
        statistics.median(round_sends) * 1e6,
        percentiles(images)[0],
        busy,
        used[0],
        statistics.mean(used[1:]) - BUSY_S * 1e6,
        _idle(processes, idle_seconds),
    )


def _seconds(what: Callable[[], Any]) -> float:
    start = time.perf_counter()
    what()
    return time.perf_counter() - start


def _timed(
    side: Side, count: int, payload: Any, reply_rank: int | None, messages: int
) -> tuple[list[float], list[float]]:
    """Seconds of each round trip, and of its sending."""
    totals, sends = [], []
    for _ in range(count):
        start = time.perf_counter()
        # A second message (sample_tokens) has no payload to speak of.
        replies = [side.send("echo", None if extra else payload, reply_rank) for extra in range(messages)]
        sent = time.perf_counter()
        for reply in replies:
            reply()
        totals.append(time.perf_counter() - start)
        sends.append(sent - start)
    return totals, sends


def _busy(side: Side, count: int) -> float:
    payload, in_flight = round_payload(), deque[list[Callable[[], Any]]]()
    start = time.perf_counter()
    for _ in range(count):
        sent = [side.send("work", payload, WORKERS - 1)]
        sent += [side.send("echo", None, WORKERS - 1) for _ in range(side.messages_a_round - 1)]
        in_flight.append(sent)
        if len(in_flight) == IN_FLIGHT:
            for reply in in_flight.popleft():
                reply()
    for sent in in_flight:
        for reply in sent:
            reply()
    return count / (time.perf_counter() - start)


def _used(process: psutil.Process) -> float:
    """CPU seconds of a process so far."""
    times = process.cpu_times()
    return times.user + times.system


def _idle(processes: list[psutil.Process], seconds: float) -> float:
    # Readers of vLLM's queue go on spinning for a second after the last message.
    time.sleep(2)
    before, start = sum(map(_used, processes)), time.perf_counter()
    time.sleep(seconds)
    return (sum(map(_used, processes)) - before) / (time.perf_counter() - start)


@contextmanager
def started(make: Callable[[], Any]) -> Iterator[Any]:
    side = make()
    try:
        yield side
    finally:
        side.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=5000, help="round trips to time (default: %(default)s)")
    parser.add_argument("--idle-seconds", type=float, default=10, help="(default: %(default)s)")
    parser.add_argument("--json", help="also write the numbers to this file")
    parser.add_argument("--turns", type=int, default=3, help="(default: %(default)s)")
    arguments = parser.parse_args()
    turns: dict[str, list[Measured]] = {Ours.name: [], Theirs.name: []}
    for _ in range(arguments.turns):
        for make in (Ours, Theirs):
            with started(make) as side:
                turns[side.name].append(measure(side, arguments.count, arguments.idle_seconds))
    medians = {
        name: {one.name: statistics.median(getattr(turn, one.name) for turn in found) for one in fields(Measured)}
        for name, found in turns.items()
    }
    ours, theirs = medians[Ours.name], medians[Theirs.name]
    print(f"{'':14} {Ours.name:>18} {Theirs.name:>18} {'ratio':>8}")
    for key, value in ours.items():
        ratio = f"{value / theirs[key]:8.2f}" if theirs[key] else f"{'-':>8}"
        print(f"{key:14} {value:18.4f} {theirs[key]:18.4f} {ratio}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(medians, indent=1) + "\n")


if __name__ == "__main__":
    main()
