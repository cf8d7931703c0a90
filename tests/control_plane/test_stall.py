"""Stages that stand still: noticed, told from slow ones, and named with what each was doing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from fake_worker import SchedulerOutput, is_running, rounds, wait_for
from vllm_handoff.executor.board import Phase, WorkerCounts
from vllm_handoff.executor.errors import ExecutorFailedError
from vllm_handoff.executor.stall import StallWatch, processor_ns_of_group

pytestmark = pytest.mark.timeout(120)

S = 1_000_000_000


class Stages:
    """Boards of two stages, a clock, and the watch that looks at them."""

    def __init__(self, limit_s: float = 30) -> None:
        self.counts = [WorkerCounts(round=7, launched=7, device_round=7) for _ in range(2)]
        self.used = [0, 0]  # by the workers themselves
        self.children_used = [0, 0]
        self.now = 1000 * S
        self.watch = StallWatch(limit_s, [_Board(self, 0), _Board(self, 1)], 1, self.processor_ns)

    def processor_ns(self, rank: int, its_own: bool) -> int:
        return self.children_used[rank] + (self.used[rank] if its_own else 0)

    def look(self, seconds: float = 2, flight: tuple[int, ...] = (7, 8)) -> str | None:
        self.now += int(seconds * S)
        return self.watch.look(self.now, flight)

    def stays(self, seconds: int, each: Callable[[], None] = lambda: None) -> str | None:
        """What the watch says in so many seconds, looking every two, while `each` happens before each look."""
        for _ in range(0, seconds, 2):
            each()
            if (why := self.look()) is not None:
                return why
        return None


class _Board:
    def __init__(self, stages: Stages, rank: int) -> None:
        self._stages, self._rank = stages, rank

    def read(self) -> WorkerCounts:
        return self._stages.counts[self._rank]


def test_a_stage_that_hangs_in_a_forward_is_named_and_its_peer_described() -> None:
    stages = Stages()
    stages.counts[0] = WorkerCounts(phase=Phase.HANDOFF, phase_ns=stages.now, round=9, launched=8, device_round=8)
    stages.counts[1] = WorkerCounts(phase=Phase.FORWARD, phase_ns=stages.now, round=7, launched=6, device_round=6)
    assert stages.stays(30) is None
    why = stages.stays(4)
    assert why is not None
    assert "No stage has advanced for 30 s with rounds 7 to 8 in flight" in why
    assert "The first to look at is rank 1 (stage 1), which waits for no other stage." in why
    assert "rank 0 (stage 0): its host waits in round 9 for tokens that the last stage has sampled, for 32 s" in why
    assert "rank 1 (stage 1): its host is in the forward of round 7, for 32 s; it has launched round 6" in why
    assert '"stall_seconds": 30' in why


def test_a_device_that_stands_still_under_hosts_that_are_done() -> None:
    stages = Stages()
    # NCCL: both hosts have launched all that they were given, the first stage's kernel never ends.
    stages.counts[0] = WorkerCounts(round=8, launched=8, device_round=6)
    stages.counts[1] = WorkerCounts(round=8, launched=8, device_round=6, output_round=7)
    # A host that spins in the driver, or a thread that polls, is no progress of the device.
    why = stages.stays(40, lambda: stages.used.__setitem__(1, stages.used[1] + 2 * S))
    assert why is not None and "The first to look at is rank 0 (stage 0), whose device does not finish." in why
    assert "it has launched round 8, and its device has finished none after round 6" in why
    assert "the output of round 7 is waited for" in why


def test_a_device_that_advances_is_no_stall() -> None:
    stages = Stages()
    stages.counts = [WorkerCounts(round=90, launched=90, device_round=6, output_round=7) for _ in range(2)]

    def advance() -> None:
        stages.counts[0].device_round += 1

    assert stages.stays(120, advance) is None


def test_a_host_at_work_is_slow_and_not_stuck() -> None:
    stages = Stages()
    stages.counts[0] = WorkerCounts(phase=Phase.FORWARD, round=8, launched=7, device_round=7)
    stages.counts[1] = WorkerCounts(phase=Phase.HOP, round=8, launched=7, device_round=7)

    def compute() -> None:
        # A prefill on a CPU, with half a core to itself.
        stages.used[0] += S

    assert stages.stays(600, compute) is None
    assert stages.stays(40) is not None


def test_a_host_that_spins_in_a_gpus_driver_is_stuck_and_one_that_serves_a_call_is_not() -> None:
    stages = Stages()
    # A kernel is loaded in the middle of a round and waits for streams that wait for the other stage.
    stages.counts[0] = WorkerCounts(phase=Phase.FORWARD, round=8, launched=7, device_round=7, on_device=1)
    stages.counts[1] = WorkerCounts(phase=Phase.COMMAND, round=7, launched=7, device_round=7, on_device=1)

    def spin() -> None:
        stages.used[0] += 2 * S

    def compile() -> None:
        stages.children_used[0] += S

    assert stages.stays(600, compile) is None
    assert stages.stays(40, spin) is not None
    stages.counts[0].phase = Phase.CALL
    assert stages.stays(600, spin) is None


@pytest.mark.parametrize("who", ["itself", "child"])
def test_a_groups_processor_time_with_and_without_its_first_process(who: str) -> None:
    spin = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ntime.sleep(60)"
    code = (
        spin if who == "itself" else f"import subprocess, sys\nsubprocess.run([sys.executable, '-S', '-c', {spin!r}])"
    )
    process = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        everybody, others = (processor_ns_of_group(process.pid, its_own) for its_own in (True, False))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert everybody >= 0.25 * S
    assert others >= 0.25 * S if who == "child" else others == 0


def test_what_a_waiting_host_uses_counts_for_nothing() -> None:
    stages = Stages()
    stages.counts[0] = WorkerCounts(phase=Phase.FORWARD, round=8, launched=7, device_round=7)
    stages.counts[1] = WorkerCounts(phase=Phase.HOP, round=8, launched=7, device_round=7)

    def poll() -> None:
        stages.used[0] += S // 50
        stages.used[1] += 2 * S

    assert stages.stays(40, poll) is not None


def test_stages_that_wait_for_each_other() -> None:
    stages = Stages()
    stages.counts[0] = WorkerCounts(phase=Phase.HANDOFF, round=8, launched=7, device_round=7)
    stages.counts[1] = WorkerCounts(phase=Phase.HOP, round=9, launched=8, device_round=8)
    why = stages.stays(40)
    assert why is not None and "The stages wait for each other" in why
    assert "waits for the hidden states of round 9 from stage 0" in why


def test_no_rounds_or_the_engines_turn_is_no_stall() -> None:
    stages = Stages()
    assert all(stages.look(100, ()) is None for _ in range(10))
    # Both have run all that was sent: a grammar is computed, or nobody steps.
    stages.counts = [WorkerCounts(round=8, launched=7, device_round=7) for _ in range(2)]
    assert all(stages.look(100, (7, 8)) is None for _ in range(10))
    # A round that has not reached a stage is another matter.
    assert stages.stays(40) is None
    stages.counts[1] = WorkerCounts(round=7, launched=7, device_round=7)
    assert stages.stays(40) is not None


def test_the_clock_starts_when_a_round_is_sent() -> None:
    stages = Stages()
    for _ in range(5):
        assert stages.look(100, ()) is None
    stages.counts[0] = WorkerCounts(phase=Phase.FORWARD, round=8)
    assert stages.look(29, (8,)) is None
    assert stages.look(29, (8,)) is None
    # The oldest round is another one: a reply came between.
    assert stages.look(2, (9,)) is None
    assert stages.look(29, (9,)) is None
    assert stages.look(2, (9,)) is not None


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_hangs_ends_the_executor(rank: int, capfd: pytest.CaptureFixture) -> None:
    called = threading.Event()
    with rounds(stall_seconds=1) as (dispatcher, plane):
        plane.register_failure_callback(called.set)
        pids = plane.pids
        futures = []
        for number in range(3):
            act = {"sample_tokens": "block"} if number == 1 else {}
            # Every rank is to answer: these stages do not wait for each other otherwise.
            dispatcher.execute_model(SchedulerOutput(note=number, act=act, rank=rank), lambda outputs: outputs[-1])
            futures.append(dispatcher.sample_tokens(None))
        # Nobody waits for a result, and it is noticed all the same.
        assert called.wait(60)
        why = plane.failure or ""
        assert "No stage has advanced for" in why and f"The first to look at is rank {rank} (stage {rank})" in why
        assert re.search(rf"rank {rank} .stage {rank}.: its host is sampling round 1, for \d+ s", why)
        assert re.search(rf"rank {1 - rank} .stage {1 - rank}.: its host waits for a command, for \d+ s", why)
        with pytest.raises(ExecutorFailedError, match="round 2: No stage has advanced"):
            futures[2].result()
        assert wait_for(lambda: not any(map(is_running, pids)))
    # Where it hangs, from the stage itself.
    assert "in sample_tokens" in capfd.readouterr().err


def test_slow_rounds_and_late_collectors_end_nothing() -> None:
    with rounds(stall_seconds=1, is_async=True) as (dispatcher, plane):
        dispatcher.execute_model(SchedulerOutput(note=0, act={"execute_model": "compute"}, seconds=3, rank=0))
        first = dispatcher.sample_tokens(None)
        # Answered, and not collected for longer than the limit.
        threading.Event().wait(4.5)
        assert first.result()["note"] == 0
        # A grammar that takes longer than the limit.
        dispatcher.execute_model(SchedulerOutput(note=1, has_structured_output_requests=True))
        threading.Event().wait(2)
        assert dispatcher.sample_tokens({"grammar": 1}).result()["note"] == 1
        # A call may take as long as it likes.
        assert plane.call("sleep", (2,)).result() == {0: 0, 1: 1}
        assert plane.failure is None


def test_progress_is_seen_while_stages_advance_and_not_in_the_engines_turn() -> None:
    stages = Stages()
    assert stages.look() is None
    first = stages.watch.progress_ns
    stages.counts[0].device_round += 1
    stages.look()
    assert stages.watch.progress_ns == stages.now > first
    advanced = stages.now
    for counts in stages.counts:
        counts.phase, counts.round = Phase.COMMAND, 8
    stages.look()
    changed = stages.now
    assert stages.watch.progress_ns == changed > advanced
    # Both have done all that they were given, and nobody collects it: no stall, and no progress either.
    assert stages.stays(100) is None
    assert stages.watch.progress_ns == changed
