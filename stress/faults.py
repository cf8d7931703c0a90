"""The faults that can be injected, and how."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# How long a fault may go unnoticed: until every request is over, and until no process is left. Where a peer has to
# be released from a collective, more.
DETECT_S = 5.0
RELEASE_S = 10.0
# The stall limit of engines that are to hang; the executor's own is two minutes.
STALL_S = 8
# In an engine's temporary folder: when an ordered fault took place, in seconds of the machine's monotonic clock.
STRUCK_FILE = "struck"


@dataclass(frozen=True)
class Fault:
    """One kind of fault.

    Attributes:
        what: in words, for reports.
        inject: does it, given the ranks' process ids, the struck rank, and a function that gives an order to the child.
        limit_s: seconds until every request must be over.
        loses_clients: whether the clients themselves are struck, so that nobody is left to be answered.
        last_stage: whether only the last rank can be struck.
        at_start: whether it strikes an engine that starts, instead of one under load.
        needs_gpu: whether there is no such thing on a CPU.
        stalls: whether nobody but the stall limit notices.
    """

    what: str
    inject: Callable[[dict[int, int], int, Callable[[dict[str, Any]], None]], None]
    limit_s: float = DETECT_S
    loses_clients: bool = False
    last_stage: bool = False
    at_start: bool = False
    needs_gpu: bool = False
    stalls: bool = False


def _signal_rank(number: signal.Signals) -> Callable[..., None]:
    def inject(pids: dict[int, int], rank: int, order: Callable[[dict[str, Any]], None]) -> None:
        os.kill(pids[rank], number)

    return inject


def _armed(what: str) -> Callable[..., None]:
    def inject(pids: dict[int, int], rank: int, order: Callable[[dict[str, Any]], None]) -> None:
        order({"arm": {"ranks": [rank], "what": what}})

    return inject


def _kill_core(pids: dict[int, int], rank: int, order: Callable[[dict[str, Any]], None]) -> None:
    os.kill(parent_of(pids[rank]), signal.SIGKILL)


def _kill_front(pids: dict[int, int], rank: int, order: Callable[[dict[str, Any]], None]) -> None:
    os.kill(parent_of(parent_of(pids[rank])), signal.SIGKILL)


FAULTS: dict[str, Fault] = {
    "kill": Fault("SIGKILL of a stage", _signal_rank(signal.SIGKILL)),
    "stop": Fault("SIGSTOP of a stage", _signal_rank(signal.SIGSTOP), limit_s=RELEASE_S),
    "kill-core": Fault("SIGKILL of the engine core", _kill_core),
    "kill-front": Fault("SIGKILL of the process with the clients", _kill_front, loses_clients=True),
    "hang": Fault("stage that hangs in a forward", _armed("hang"), STALL_S + RELEASE_S, stalls=True),
    "kernel": Fault("kernel that never ends", _armed("kernel"), STALL_S + RELEASE_S, needs_gpu=True, stalls=True),
    "raise-forward": Fault("exception in a stage's forward", _armed("raise-forward"), limit_s=RELEASE_S),
    "memory": Fault("out of memory in a stage's forward", _armed("memory"), limit_s=RELEASE_S),
    "raise-sample": Fault("exception while sampling", _armed("raise-sample"), limit_s=RELEASE_S),
    "raise-output": Fault("exception in the output copy", _armed("raise-output"), limit_s=RELEASE_S, last_stage=True),
    "manifest": Fault("manifest that differs on a stage", _armed("manifest"), limit_s=RELEASE_S, last_stage=True),
    "control": Fault("corrupt control message of a stage", _armed("control"), limit_s=RELEASE_S),
    "twice": Fault("reply of a stage that comes twice", _armed("twice"), limit_s=RELEASE_S, last_stage=True),
    "start-kill": Fault("SIGKILL of a stage that starts", _signal_rank(signal.SIGKILL), RELEASE_S, at_start=True),
    "start-core": Fault("SIGKILL of an engine core that starts", _kill_core, RELEASE_S, at_start=True),
    "start-front": Fault("SIGKILL of the process that starts an engine", _kill_front, RELEASE_S, True, at_start=True),
}


def struck_rank(fault: Fault, pids: dict[int, int], rng: random.Random) -> int:
    """Which rank it is to be."""
    return max(pids) if fault.last_stage else rng.choice(sorted(pids))


def parent_of(pid: int) -> int:
    """The parent's process id; 0 if the process is gone."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0
