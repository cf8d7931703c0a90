"""Makes a failed case smaller by running parts of it again."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from vllm_handoff.stress.campaign import DRAIN_S, Campaign
from vllm_handoff.stress.checks import Problem
from vllm_handoff.stress.figures import Figures
from vllm_handoff.stress.life import Life
from vllm_handoff.stress.plan import Case
from vllm_handoff.stress.session import Session


class Rerun:
    """Runs cases again, on one engine as long as it lives."""

    def __init__(self, campaign: Campaign) -> None:
        self._campaign = campaign
        self._life: Life | None = None

    def __call__(self, case: Case, seconds: float) -> list[Problem]:
        """The problems that a case has this time, within some seconds; none is no proof that it is well."""
        if self._life is None:
            self._life = self._campaign.open_life()
        if self._life is None or self._campaign.oracle is None:
            return []
        session = Session(self._life, case, self._campaign.oracle, Figures())
        session.start()
        session.follow(time.monotonic() + seconds)
        if session.dead and not session.problems:
            session.problems.append(Problem("exit", f"the engine's process ended:\n{self._life.last_words()}"))
        if not session.done or session.problems:
            # Whatever is still under way would disturb the next one.
            self.close()
        return session.problems

    def close(self) -> None:
        if self._life is not None:
            self._life.bury()
            self._life = None


def shrink(
    case: Case, fails: Callable[[Case, float], list[Problem]], first: list[int], seconds: float
) -> tuple[Case, list[Problem]]:
    """The smallest part of a case that still failed when it ran again.

    Args:
        fails: runs a case and gives its problems.
        first: the part to try first: what was about when it failed.
        seconds: to stop after.

    Returns:
        The part with its problems; the whole case and no problems if nothing failed again.
    """
    deadline = time.monotonic() + seconds
    assert case.numbers is not None
    smallest, problems = case.numbers, []

    def attempt(numbers: tuple[int, ...]) -> bool:
        nonlocal smallest, problems
        remaining = deadline - time.monotonic()
        if not numbers or remaining <= 0:
            return False
        found = fails(replace(case, numbers=numbers), min(remaining, DRAIN_S))
        if found:
            smallest, problems = numbers, found
        return bool(found)

    if not attempt(tuple(first)) and not attempt(case.numbers):
        return case, []
    parts = 2
    while len(smallest) > 1 and time.monotonic() < deadline:
        size = -(-len(smallest) // parts)
        pieces = [smallest[start : start + size] for start in range(0, len(smallest), size)]
        rests = [tuple(n for n in smallest if n not in piece) for piece in pieces] if len(pieces) > 2 else []
        if any(attempt(piece) for piece in pieces):
            parts = 2
        elif any(attempt(rest) for rest in rests):
            parts = max(2, parts - 1)
        elif size == 1:
            break
        else:
            parts = min(len(smallest), 2 * parts)
    return replace(case, numbers=smallest), problems
