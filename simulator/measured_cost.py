"""A stage's time as a function of a round's work, fitted to the rounds of a recording.

What a recording calls compute is the device's time in a round less its waits,
launch gaps included: where a host is late, a round looks longer than its work.
Of rounds with the same work the quick ones therefore count.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_handoff.scheduler_ext.stage_cost import RoundWork

# Of rounds with like work, the share that is quicker than the time taken for all of them.
QUICK = 0.2
# Context grows with every round: rounds whose context differs by less are like each other.
_CONTEXT_STEP = 1.1
# Marks of a recorded round, by position; see vllm_handoff.worker.recorder.Mark.
_BEGIN, _HANDOFF, _HOP_WAIT, _HOP, _, _END = range(6)


@dataclass(frozen=True)
class MeasuredCost:
    """Seconds of a stage for a round, linear in its work.

    Attributes:
        base: of any round.
        decoding: more for a round that decodes: the last stage's head.
        per_row, per_context: for decoding rows, and for the context that they attend to.
        per_prompt_token, per_prompt_context: the same for prompt tokens.
    """

    base: float
    decoding: float
    per_row: float
    per_context: float
    per_prompt_token: float
    per_prompt_context: float

    def seconds(self, work: RoundWork) -> float:
        """Time of one round."""
        return sum(
            coefficient * amount
            for coefficient, amount in zip(
                (self.base, self.decoding, self.per_row, self.per_context, self.per_prompt_token,
                 self.per_prompt_context),
                _amounts(work), strict=True,
            )
        )  # fmt: skip

    @classmethod
    def fit(cls, points: Sequence[tuple[RoundWork, float]]) -> MeasuredCost:
        """Least squares of relative errors, no coefficient below zero.

        Raises:
            ValueError: no points.
        """
        import numpy as np

        if not points:
            raise ValueError("no rounds to fit a stage's time to")
        amounts = np.array([_amounts(work) for work, _ in points], dtype=float)
        seconds = np.array([time for _, time in points])
        scale = amounts.max(axis=0)
        used = [column for column in range(amounts.shape[1]) if scale[column] > 0]
        while True:
            matrix = amounts[:, used] / scale[used] / seconds[:, None]
            found = np.linalg.lstsq(matrix, np.ones(len(points)), rcond=None)[0]
            if (found >= 0).all():
                break
            used.pop(int(found.argmin()))
        coefficients = np.zeros(amounts.shape[1])
        coefficients[used] = found / scale[used]
        return cls(*(float(value) for value in coefficients))


def _amounts(work: RoundWork) -> tuple[float, ...]:
    return (1, bool(work.rows), work.rows, work.context, work.prompt_tokens, work.prompt_context)


def points_of(rounds: Iterable[Sequence[Any]]) -> list[tuple[RoundWork, float]]:
    """(work, seconds) of one rank's recorded rounds (worker.recorder.RecordedRound), like rounds as one."""
    groups: defaultdict[tuple[int, ...], list[tuple[RoundWork, float]]] = defaultdict(list)
    for _, num_tokens, samples, marks, _, (decodes, context, prompt_context) in rounds:
        if not num_tokens or marks[_BEGIN] is None or marks[_END] is None:
            continue
        seconds = marks[_END] - (marks[_BEGIN] if marks[_HANDOFF] is None else marks[_HANDOFF])
        if marks[_HOP] is not None:
            seconds -= marks[_HOP] - marks[_HOP_WAIT]
        prompt = num_tokens - decodes
        work = RoundWork(decodes, prompt, samples, context, prompt_context)
        steps = [int(math.log(1 + value, _CONTEXT_STEP)) for value in (context, prompt_context)]
        groups[decodes, prompt, *steps].append((work, seconds))
    found = []
    for group in groups.values():
        group.sort(key=lambda point: point[1])
        found.append(group[int(QUICK * len(group))])
    return found
