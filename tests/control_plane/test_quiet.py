"""Long healthy waits: nobody wakes up, nobody warns, and the next round is answered as ever."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path

import pytest

from fake_worker import SchedulerOutput, rounds

pytestmark = pytest.mark.timeout(120)

WAIT_S = 5.0


def wake_ups(pid: int, own_thread: int | None = None) -> int:
    """How often the threads of a process have been put to sleep so far; not those of `own_thread`."""
    count = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        if task.name == str(own_thread):
            continue
        with contextlib.suppress(OSError):
            status = (task / "status").read_text()
            count += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return count


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_idle_engine_sleeps(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with rounds(stall_seconds=4, is_async=True) as (dispatcher, plane):
        dispatcher.execute_model(SchedulerOutput(note=0))
        assert dispatcher.sample_tokens(None).result()["note"] == 0
        time.sleep(1)
        caplog.clear()
        capfd.readouterr()
        pids = [*plane.pids, os.getpid()]
        own = os.getpid()
        before = [(wake_ups(pid, own), processor_s(pid)) for pid in pids]
        time.sleep(WAIT_S)
        after = [(wake_ups(pid, own), processor_s(pid)) for pid in pids]
        for rank, ((woken, used), (woken_then, used_then)) in enumerate(zip(after, before, strict=True)):
            # The engine's supervisor looks after its workers once in a while; a worker does nothing at all.
            most = WAIT_S if rank == len(plane.pids) else 3
            assert woken - woken_then <= most, f"process {rank} woke up {woken - woken_then} times"
            assert used - used_then <= 0.1
        # Longer than the stall limit: an idle engine is not one that stands still.
        assert plane.failure is None
        dispatcher.execute_model(SchedulerOutput(note=1))
        assert dispatcher.sample_tokens(None).result()["note"] == 1
        assert not caplog.records
        assert capfd.readouterr().err == ""


def test_a_long_round_is_waited_for_in_silence(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture) -> None:
    """A prefill far longer than the stall limit, on one stage, while the other has nothing to do."""
    caplog.set_level(logging.INFO)
    with rounds(stall_seconds=2, is_async=True) as (dispatcher, plane):
        time.sleep(0.5)
        waiting = plane.pids[0]
        before, used = wake_ups(waiting), processor_s(waiting)
        dispatcher.execute_model(SchedulerOutput(note=0, act={"execute_model": "compute"}, rank=1, seconds=WAIT_S))
        assert dispatcher.sample_tokens(None).result()["note"] == 0
        assert wake_ups(waiting) - before <= 20 and processor_s(waiting) - used <= 0.2
        assert plane.failure is None and not caplog.records and capfd.readouterr().err == ""
