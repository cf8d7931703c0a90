"""One load on one life: follows its events and checks every answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from vllm_handoff.stress.checks import ERROR, LEFT, Oracle, Problem, check
from vllm_handoff.stress.figures import Figures
from vllm_handoff.stress.life import Life
from vllm_handoff.stress.plan import Case

# No event for that long while requests wait for answers: the engine hangs.
STALL_S = 60.0
_LAST_ANSWERS = 64


class Session:
    """Runs a case on a life.

    Args:
        oracle: what the answers should be.
        figures: where everything is counted.
        progress: called with each event's number of new tokens.
    """

    def __init__(
        self, life: Life, case: Case, oracle: Oracle, figures: Figures, progress: Callable[[int], None] = lambda _: None
    ) -> None:
        self._life = life
        self._case = case
        self._oracle = oracle
        self._figures = figures
        self._progress = progress
        self.problems: list[Problem] = []
        # Request numbers with the time at which each was sent, and those that are over with (begin, end).
        self.pending: dict[int, float] = {}
        self.spans: dict[int, tuple[float, float]] = {}
        self.answers: dict[int, tuple[list[int], str]] = {}
        self.done = False
        self.dead = False
        # Errors are what an injected fault is to lead to; without one they are problems.
        self.struck = False
        self.last_end = 0.0
        self._last_event = time.monotonic()
        self._counts: dict[str, int] = {}
        self._recent: dict[int, list[int]] = {}

    def start(self) -> None:
        """Give the order to begin."""
        self._life.order({"run": self._case.to_json()})

    def follow(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Take events until a time, the load's end, the child's end, a problem, or stop()."""
        while not (self.done or self.dead or self.problems or stop()):
            remaining = until - time.monotonic()
            if remaining <= 0:
                return
            event = self._life.event(min(remaining, 1.0))
            if event is None:
                self.dead = True
                return
            self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        now = time.monotonic()
        if "sent" in event:
            self.pending[event["sent"]] = event["at"]
            self._figures.requests += 1
        elif "ended" in event:
            self._ended(event)
        elif "counts" in event:
            self._count(event["counts"])
        elif "done" in event:
            self.done = True
        if "sent" in event or "ended" in event:
            self._last_event = now
        elif self.pending and not self.struck and now - self._last_event > STALL_S:
            what = (
                f"nothing came back for {STALL_S:.0f} s, {len(self.pending)} requests wait: {sorted(self.pending)[:10]}"
            )
            self.problems.append(Problem("stall", what))

    def _ended(self, event: dict[str, Any]) -> None:
        number, tokens, finish = event["ended"], event["tokens"], event["finish"]
        begin = self.pending.pop(number, event["at"])
        self.spans[number] = begin, event["at"]
        self.last_end = event["at"]
        self._figures.tokens += len(tokens)
        self._progress(len(tokens))
        if finish == ERROR:
            self._figures.errors += 1
            if not self.struck:
                self.problems.append(Problem("error", f"request {number}: {event['error']}", number))
        elif finish == LEFT:
            self._figures.left += 1
        else:
            self._figures.answered += 1
        self.answers[number] = tokens, finish
        if self._case.life >= 0:
            self._check(number, tokens, finish)
            # Kept only as long as another answer may be compared with it.
            del self.answers[number]

    def _check(self, number: int, tokens: list[int], finish: str) -> None:
        request = self._case.request(number)
        expected = self._oracle(self._case, request)
        problem = check(request, expected, tokens, LEFT if finish == ERROR else finish, self._others(number))
        self._recent[number] = expected.token_ids
        if len(self._recent) > _LAST_ANSWERS:
            del self._recent[next(iter(self._recent))]
        if problem is not None:
            self.problems.append(problem)

    def _others(self, number: int) -> Iterator[int]:
        """Tokens of the answers to the requests that were about at the same time."""
        for other, found in self._recent.items():
            if other != number:
                yield from found
        for other in self.pending:
            yield from self._oracle(self._case, self._case.request(other)).token_ids

    def _count(self, counts: dict[str, int]) -> None:
        for name in ("rounds", "handoffs", "preemptions"):
            increase = counts[name] - self._counts.get(name, 0)
            setattr(self._figures, name, getattr(self._figures, name) + increase)
        self._counts = counts
