"""The least time in which any schedule could serve a load, from the stages' times alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from vllm_handoff.scheduler_ext.stage_cost import RoundWork


class Cost(Protocol):
    """A stage's time, modelled (StageCost) or measured (MeasuredCost)."""

    @property
    def per_prompt_token(self) -> float:
        """Seconds."""

    @property
    def per_prompt_context(self) -> float:
        """Seconds for every token that a prompt token attends to."""

    def seconds(self, work: RoundWork) -> float:
        """Of one round."""


class Bound(NamedTuple):
    """A lower bound.

    Attributes:
        seconds: the bound.
        cohorts: into how many the requests are divided to reach it.
        prefill: part of `seconds` that the prompts take.
    """

    seconds: float
    cohorts: int
    prefill: float


def bound(load: tuple[int, int, int], costs: Sequence[Cost]) -> Bound:
    """For (requests, prompt tokens, generated tokens), all at once.

    Each stage has to read its weights once for every round, so k cohorts read
    them k times for every token of a request: that is why two stages are not
    twice as fast as one. With k cohorts of n / k rows, one token more of every
    request takes the slowest stage k rounds, and no less than one cohort's way
    through all stages. The prompts add the slowest stage's time for their
    tokens; that they could ride in rounds that read the weights anyway keeps
    this a bound. Hosts, transfers, filling and draining cost nothing here.
    """
    requests, prompt, generated = load
    context = prompt + generated / 2
    tokens = requests * prompt

    def prefill_of(cost: Cost) -> float:
        return cost.per_prompt_token * tokens + cost.per_prompt_context * tokens * prompt / 2

    prefill = max(prefill_of(cost) for cost in costs)
    found = []
    for cohorts in range(1, min(len(costs), requests) + 1):
        work = RoundWork.decode(requests / cohorts, context)
        times = [cost.seconds(work) for cost in costs]
        found.append((prefill + (generated - 1) * max(cohorts * max(times), sum(times)), cohorts))
    seconds, cohorts = min(found)
    return Bound(seconds, cohorts, prefill)
