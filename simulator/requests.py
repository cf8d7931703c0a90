"""Simulated requests, and the loads that are made of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class SimulatedRequest:
    """One request: what was asked for, and how far it has come.

    Attributes:
        number: its place in the order of arrival.
        arrival: seconds at which the engine sees it.
        prompt: tokens of its prompt.
        budget: tokens it may generate.
        stop_after: tokens after which the model ends by itself; None: only the budget ends it.
        computed: tokens in the KV cache, rounds in flight included.
        prefill: tokens to be computed before it decodes; after a preemption its answer so far too.
        planned: tokens that rounds so far yield, those in flight included.
        generation: counts preemptions, so that rounds in flight of an earlier life are told apart.
        eligible: step from which it may decode again.
        newest_round: number of the round that yields its newest token, -1 before the first.
        times: seconds at which the engine had each of its tokens.
        rounds: numbers of the rounds it was in, in the order of scheduling.
        longest_wait: most rounds from one that yields a token of it to the next.
    """

    number: int
    arrival: float
    prompt: int
    budget: int
    stop_after: int | None = None
    computed: int = 0
    prefill: int = 0
    planned: int = 0
    generation: int = 0
    eligible: int = 0
    blocks: int = 0
    newest_round: int = -1
    longest_wait: int = 0
    times: list[float] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)

    @property
    def known(self) -> int:
        """Tokens that the engine has."""
        return len(self.times)

    @property
    def length(self) -> int:
        """Tokens after which it is finished."""
        return self.budget if self.stop_after is None else min(self.budget, self.stop_after)

    @property
    def finished(self) -> bool:
        return len(self.times) >= self.length

    @property
    def decodes(self) -> bool:
        """Whether its prefill is planned to the end."""
        return self.computed >= self.prefill


def burst(count: int, prompt: int, generated: int, apart: float = 0.0) -> list[SimulatedRequest]:
    """`count` requests, each `apart` seconds after the one before: a client hands them over one by one."""
    return [SimulatedRequest(i, i * apart, prompt, generated) for i in range(count)]


def draining(count: int, left: int, prompt: int, short: int, long: int) -> list[SimulatedRequest]:
    """A burst of which all but `left` end after `short` tokens, and those after `long`."""
    return [SimulatedRequest(i, 0.0, prompt, long if i < left else short) for i in range(count)]


def poisson(
    count: int, rate: float, prompts: tuple[int, int], generated: tuple[int, int], seed: int = 0
) -> list[SimulatedRequest]:
    """Requests at random times, `rate` a second, with lengths drawn evenly from two ranges."""
    rng = random.Random(seed)
    now, made = 0.0, []
    for number in range(count):
        now += rng.expovariate(rate)
        made.append(SimulatedRequest(number, now, rng.randint(*prompts), rng.randint(*generated)))
    return made


class Arrivals:
    """Where the engine gets its requests from: a list, and optionally a successor for each that ends.

    Args:
        requests: those that come by themselves.
        next_one: called with a request's number and the time when a request ends, for a closed loop of clients.
    """

    def __init__(
        self,
        requests: Sequence[SimulatedRequest],
        next_one: Callable[[int, float], SimulatedRequest | None] = lambda number, now: None,
    ) -> None:
        self.all = sorted(requests, key=lambda request: request.arrival)
        self._waiting = list(reversed(self.all))
        self._next_one = next_one

    @property
    def upcoming(self) -> float | None:
        """When the next request arrives, None if none does."""
        return self._waiting[-1].arrival if self._waiting else None

    def until(self, now: float) -> list[SimulatedRequest]:
        """The requests that have arrived by `now` and were not returned before."""
        arrived = []
        while self._waiting and self._waiting[-1].arrival <= now:
            arrived.append(self._waiting.pop())
        return arrived

    def ended(self, now: float) -> None:
        """A client got its last token at `now`: it may ask again."""
        follower = self._next_one(len(self.all), now)
        if follower is not None:
            self.all.append(follower)
            self._waiting.insert(0, follower)
            self._waiting.sort(key=lambda request: -request.arrival)


def closed_loop(clients: int, count: int, prompt: int, generated: tuple[int, int], seed: int = 0) -> Arrivals:
    """`clients` clients that send `count` requests in all, each a new one as soon as its last is answered.

    The number of generated tokens is drawn evenly from a range, so that the clients do not march in step.
    """
    rng = random.Random(seed)

    def make(number: int, now: float) -> SimulatedRequest | None:
        return SimulatedRequest(number, now, prompt, rng.randint(*generated)) if number < count else None

    return Arrivals([r for r in (make(i, 0.0) for i in range(clients)) if r is not None], make)
