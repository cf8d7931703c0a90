"""What a test asks of an engine, and what comes back. Plain data: it travels between processes."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable
from typing import Any, NamedTuple

# Of the tiny models.
VOCABULARY = 512
# Tokens below are special (end of text and so on).
FIRST_TOKEN = 8


class Ask(NamedTuple):
    """A prompt, and its sampling parameters as the text of a dict, so that an Ask can be a key.

    Attributes:
        sounds: samples (16 kHz) in each sound that the prompt has a token for; those of one length are the same.
    """

    prompt: tuple[int, ...]
    params: str
    sounds: tuple[int, ...] = ()


class Answer(NamedTuple):
    """What an engine made of an Ask."""

    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: int | str | None = None
    text: str = ""


class Arrival(NamedTuple):
    """A request, when it arrives, and when its client goes away.

    Attributes:
        step: the engine step before which it arrives.
        abort_after: abort it once that many tokens have come back.
        abort_steps: abort it that many steps after it arrived.
    """

    req_id: str
    ask: Ask
    step: int = 0
    abort_after: int | None = None
    abort_steps: int | None = None


def greedy(prompt: Iterable[int], max_tokens: int, **params: Any) -> Ask:
    """Ask for the likeliest tokens. Ends early only at stop tokens and strings that are given."""
    return Ask(tuple(prompt), repr({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **params}))


def changed(ask: Ask, **params: Any) -> Ask:
    """The same with other sampling parameters."""
    return ask._replace(params=repr({**ast.literal_eval(ask.params), **params}))


def random_prompt(rng: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rng.randrange(FIRST_TOKEN, VOCABULARY) for _ in range(length))


def with_aborts(arrivals: list[Arrival], seed: int) -> list[Arrival]:
    """A third of the clients go away: some after a number of tokens, some after a number of steps."""
    rng = random.Random(seed)
    leaving = []
    for arrival in arrivals:
        if (chance := rng.random()) < 0.17:
            arrival = arrival._replace(abort_after=rng.randint(1, 20))
        elif chance < 0.34:
            arrival = arrival._replace(abort_steps=rng.randint(0, 30))
        leaving.append(arrival)
    return leaving


def over_time(seed: int, count: int, longest_prompt: int, most_tokens: int, every: float) -> list[Arrival]:
    """Requests of all sizes that arrive while others run, about one in `every` steps. Half of them share a prefix."""
    rng = random.Random(seed)
    prefix = random_prompt(rng, longest_prompt)
    arrivals, step = [], 0.0
    for number in range(count):
        length = rng.randint(1, longest_prompt)
        shared = rng.randint(0, length - 1) if number % 2 else 0
        prompt = prefix[:shared] + random_prompt(rng, length - shared)
        arrivals.append(Arrival(f"request-{number}", greedy(prompt, rng.randint(1, most_tokens)), int(step)))
        step += rng.uniform(0, 2 * every)
    return arrivals
