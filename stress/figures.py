"""The figures of a run, and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_handoff.stress.checks import Problem

# A shorter look says nothing: an allocator takes memory by the megabyte.
LEAST_LOOK_S = 30.0


@dataclass
class FaultFigures:
    """What became of the faults of one kind.

    Attributes:
        injected: how many.
        detected: those after which every request was over in time.
        longest_s: the longest time until every request was over.
        longest_gone_s: the longest time until no process was left.
    """

    injected: int = 0
    detected: int = 0
    longest_s: float = 0.0
    longest_gone_s: float = 0.0


@dataclass
class Figures:
    """Counts of a run.

    Attributes:
        answered: answers that came complete and were compared.
        left: requests whose client went away; what it had got was compared.
        errors: requests that ended with an error after an injected fault.
        tokens: tokens that came back, all of them compared.
        preemptions, rounds, handoffs: as the engines counted them, a second before a fault at the latest.
        memory_growth: bytes a minute by which the process grew that grew most, in the last two thirds of an engine's
            life that no fault ended; None if none was long enough.
    """

    seconds: float = 0.0
    lives: int = 0
    requests: int = 0
    answered: int = 0
    left: int = 0
    errors: int = 0
    tokens: int = 0
    preemptions: int = 0
    rounds: int = 0
    handoffs: int = 0
    memory_growth: float | None = None
    faults: dict[str, FaultFigures] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def note_memory(self, before: Mapping[int, int], after: Mapping[int, int], seconds: float) -> None:
        """Take in the resident bytes of an engine's processes at the ends of a time under load."""
        grown = [after[pid] - before[pid] for pid in after if pid in before]
        if grown and seconds >= LEAST_LOOK_S:
            self.memory_growth = max(max(grown) * 60 / seconds, self.memory_growth or 0.0)

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["problems"] = [problem._asdict() for problem in self.problems]
        values["longest_time_to_detect_s"] = max((fault.longest_s for fault in self.faults.values()), default=None)
        return values

    def table(self) -> str:
        """The figures for people."""
        rows: list[tuple[str, Any]] = [
            ("seconds", f"{self.seconds:.0f}"),
            ("engines started", self.lives),
            ("requests", self.requests),
            ("  answered, and right", self.answered - sum(problem.number is not None for problem in self.problems)),
            ("  client went away", self.left),
            ("  ended by an injected fault", self.errors),
            ("  lost with their killed clients", self.requests - self.answered - self.left - self.errors),
            ("tokens", self.tokens),
            ("tokens/s", f"{self.tokens / self.seconds:.0f}" if self.seconds else "-"),
            ("rounds", self.rounds),
            ("handoffs", self.handoffs),
            ("preemptions", self.preemptions),
            ("memory, MB a minute", "-" if self.memory_growth is None else f"{self.memory_growth / 1e6:.2f}"),
            ("leaks", len(self.leaks)),
            ("problems", len(self.problems)),
        ]
        lines = [f"  {name:<32}{value!s:>12}" for name, value in rows]
        if self.faults:
            lines += ["", f"  {'faults':<16}{'injected':>10}{'noticed':>10}{'answered by':>14}{'gone by':>12}"]
            for name, fault in self.faults.items():
                lines.append(
                    f"  {name:<16}{fault.injected:>10}{fault.detected:>10}"
                    f"{fault.longest_s:>12.2f} s{fault.longest_gone_s:>10.2f} s"
                )
        return "\n".join(lines)
