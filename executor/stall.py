"""Notices that the pipeline stands still, and says what each stage was doing.

Nothing is asked of the workers: one that is stuck could not answer. Each keeps
on its board what its host does in which round, how far its device is, and
which output it waits for (see board.py); this looks at the boards.

What counts as progress, of any stage: its host goes from one thing to the
next; its device finishes a round; or its host is at work, which shows in
processor time. So neither a prefill of minutes on a CPU nor a compiler that
runs in the first round is a stall, and a stage that waits for a peer counts
for nothing. On a GPU a host only launches rounds, and one that the driver lets
spin looks as if it were at work: there, in a round, only its children's time
counts, compilers'. A host that computes for ever on a CPU is not noticed here;
VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS ends that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from vllm_handoff.executor.board import Phase, WorkerCounts

# A host that is at work uses at least this share of a core, others' load allowed for; one that waits, a hundredth.
_AT_WORK = 0.2
_WORKING = (Phase.CALL, Phase.FORWARD, Phase.SAMPLING)


class CountsReader(Protocol):
    """What a BoardReader of WorkerCounts does."""

    def read(self) -> WorkerCounts: ...


class StallWatch:
    """Judges the stages of one engine by successive looks.

    Args:
        limit_s: seconds without any progress that are a stall.
        boards: the workers' boards, by rank.
        stage_size: workers a stage.
        processor_ns: given a rank, and whether its own process counts, the processor time that its
            processes have used so far, in ns.
    """

    def __init__(
        self, limit_s: float, boards: Sequence[CountsReader], stage_size: int, processor_ns: Callable[[int, bool], int]
    ) -> None:
        self.limit_s = limit_s
        self._boards = boards
        self._stage_size = stage_size
        self._processor_ns = processor_ns
        self._seen: tuple | None = None
        self._advanced_ns = 0
        # When a stage was last seen to advance; unlike the time above it stands still in the engine's turn.
        self.progress_ns = 0
        # When processor times were last read, and what they were.
        self._used: tuple[int, list[int]] | None = None

    def look(self, now: int, rounds: Sequence[int]) -> str | None:
        """Look once.

        Args:
            now: ns of the machine's monotonic clock.
            rounds: numbers of the rounds in flight, oldest first.

        Returns:
            What is wrong, in words, once there was no progress for the limit; else None.
        """
        workers = [board.read() for board in self._boards]
        seen = tuple(msgspec.structs.astuple(counts) for counts in workers), rounds[:1]
        if rounds and seen != self._seen:
            self.progress_ns = now
        if not rounds or seen != self._seen or self._is_engines_turn(workers, rounds):
            self._seen, self._advanced_ns, self._used = seen, now, None
            return None
        if self._is_at_work(workers, now):
            self._advanced_ns = self.progress_ns = now
        if now - self._advanced_ns < self.limit_s * 1e9:
            return None
        return self._describe(workers, rounds, now)

    @staticmethod
    def _is_engines_turn(workers: list[WorkerCounts], rounds: Sequence[int]) -> bool:
        """Whether every stage has done all that it was given: what is missing is a grammar, or somebody who steps."""
        return all(
            counts.phase == Phase.COMMAND and counts.round >= rounds[-1] and counts.output_round < 0
            for counts in workers
        )

    def _is_at_work(self, workers: list[WorkerCounts], now: int) -> bool:
        """Whether a host has used the processor since the last look for work of its own."""
        used = [self._used_by(rank, counts) for rank, counts in enumerate(workers)]
        before, self._used = self._used, (now, used)
        if before is None:
            return False
        then, used_then = before
        return any(b and a - b >= _AT_WORK * (now - then) for a, b in zip(used, used_then))

    def _used_by(self, rank: int, counts: WorkerCounts) -> int:
        """Processor time that may be work: none of a host that its device holds up, or that waits."""
        if counts.phase not in _WORKING or counts.device_round != counts.launched:
            return 0
        return self._processor_ns(rank, counts.phase == Phase.CALL or not counts.on_device)

    def _describe(self, workers: list[WorkerCounts], rounds: Sequence[int], now: int) -> str:
        flight = f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}"
        lines = [
            f"rank {rank} (stage {rank // self._stage_size}): {self._doing(rank, counts, now)}"
            for rank, counts in enumerate(workers)
        ]
        return (
            f"No stage has advanced for {(now - self._advanced_ns) / 1e9:.0f} s with {flight} in flight. "
            f"{self._suspect(workers)} What each was doing:\n  "
            + "\n  ".join(lines)
            + "\nRestart the engine; if a round may really take so long, raise --additional-config "
            f'\'{{"handoff": {{"stall_seconds": {self.limit_s:g}}}}}\'.'
        )

    def _suspect(self, workers: list[WorkerCounts]) -> str:
        """Who holds the others up: whoever waits for nobody, in the earliest round and at the earliest stage."""
        stuck: list[tuple[int, int, str]] = []
        for rank, counts in enumerate(workers):
            if counts.device_round != counts.launched:
                stuck.append((counts.device_round + 1, rank, "whose device does not finish"))
            elif counts.phase in _WORKING:
                stuck.append((counts.round, rank, "which waits for no other stage"))
            elif counts.output_round >= 0:
                stuck.append((counts.output_round, rank, "whose output does not come"))
        if not stuck:
            return "The stages wait for each other, which is a fault in vllm-handoff: please report it."
        _, rank, why = min(stuck)
        return f"The first to look at is rank {rank} (stage {rank // self._stage_size}), {why}."

    def _doing(self, rank: int, counts: WorkerCounts, now: int) -> str:
        stage, number = rank // self._stage_size, counts.round
        words = {
            Phase.COMMAND: "its host waits for a command",
            Phase.CALL: "its host serves a call",
            Phase.FORWARD: f"its host is in the forward of round {number}",
            Phase.SAMPLING: f"its host is sampling round {number}",
            Phase.HOP: f"its host waits for the hidden states of round {number} from stage {stage - 1}",
            Phase.HANDOFF: f"its host waits in round {number} for tokens that the last stage has sampled",
            Phase.SEND: f"its host waits in round {number} until a stage takes what it was sent",
        }
        text = f"{words[Phase(counts.phase)]}, for {max(0, now - counts.phase_ns) / 1e9:.0f} s"
        if counts.launched < 0:
            return text
        text += f"; it has launched round {counts.launched}"
        if counts.device_round != counts.launched:
            done = f"none after round {counts.device_round}" if counts.device_round >= 0 else "none"
            text += f", and its device has finished {done}"
        if counts.output_round >= 0:
            text += f"; the output of round {counts.output_round} is waited for"
        return text


def processor_ns_of_group(pid: int, its_own: bool = True) -> int:
    """The processor time of a process group's live processes and of their ended children, in ns.

    Args:
        pid: the group, and its first process.
        its_own: whether that process's own time counts.
    """
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[2]) == pid:
                # utime, stime, cutime, cstime
                first = 11 if its_own or int(stat.parent.name) != pid else 13
                ticks += sum(map(int, fields[first:15]))
    return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
