"""The load: which requests arrive when, all of it a function of a seed, so that any part of it can be run again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from vllm_handoff.stress.toy_tokens import VOCABULARY

# Requests that arrive in the same way.
BLOCK = 40
# The "life" whose requests are the different ones of a pool, each once.
REFERENCE = -1


@dataclass(frozen=True)
class Mix:
    """What the load is made of. Shares are parts of one.

    Attributes:
        seed: of everything random.
        rate: requests a second in steady phases.
        prompt: shortest and longest prompt, in tokens.
        output: least and most tokens of an answer.
        outstanding: requests that may be unanswered at once; more wait with the client.
        abort: share of clients that go away before their answer is complete.
        burst: share of phases whose requests arrive all at once.
        drain: share of phases that begin when no request is left.
        stop: share of requests with stop tokens.
        sampling: share of requests with sampling options.
        structured: share of requests with a grammar.
        prefix: share of requests that begin like others.
        vocabulary: tokens of prompts are below this number.
        pool: requests are drawn from that many different ones; 0: each is new.
        drafts: the engine decodes speculatively, and so takes no request with min_p or logit_bias.
    """

    seed: int = 0
    rate: float = 20.0
    prompt: tuple[int, int] = (1, 200)
    output: tuple[int, int] = (1, 80)
    outstanding: int = 64
    abort: float = 0.15
    burst: float = 0.25
    drain: float = 0.15
    stop: float = 0.2
    sampling: float = 0.3
    structured: float = 0.0
    prefix: float = 0.2
    vocabulary: int = VOCABULARY
    pool: int = 0
    drafts: bool = False

    @classmethod
    def of(cls, values: dict[str, Any]) -> Mix:
        """From the dict that `asdict` gave, through JSON."""
        return cls(**{**values, "prompt": tuple(values["prompt"]), "output": tuple(values["output"])})

    def only_plain(self) -> Mix:
        """The same without what would make answers depend on chance with a real model."""
        return replace(self, sampling=0.0)


@dataclass(frozen=True)
class Planned:
    """One request.

    Attributes:
        number: its place in the plan.
        gap: seconds to wait after the one before.
        drain: whether to wait first until no request is left.
        prompt: token ids.
        params: sampling parameters; see toy_tokens.answer.
        abort_tokens: the client goes away once that many tokens have come.
        abort_seconds: the client goes away after that time.
    """

    number: int
    gap: float
    drain: bool
    prompt: tuple[int, ...]
    params: dict[str, Any]
    abort_tokens: int | None = None
    abort_seconds: float | None = None


@dataclass(frozen=True)
class Case:
    """A part of a plan: one engine life's requests, all of them or those with the given numbers."""

    mix: Mix
    life: int = 0
    numbers: tuple[int, ...] | None = None

    def requests(self) -> Iterator[Planned]:
        """The requests in the order in which they arrive; without end if `numbers` is None."""
        for number in itertools.count() if self.numbers is None else self.numbers:
            yield self.request(number)

    def request(self, number: int) -> Planned:
        """The request with that number."""
        if self.life == REFERENCE:
            return pool_request(self.mix, number)
        return planned(self.mix, self.life, number)

    def to_json(self) -> dict[str, Any]:
        return {"mix": asdict(self.mix), "life": self.life, "numbers": self.numbers}

    @classmethod
    def of(cls, values: dict[str, Any]) -> Case:
        numbers = values["numbers"]
        return cls(Mix.of(values["mix"]), values["life"], None if numbers is None else tuple(numbers))


def planned(mix: Mix, life: int, number: int) -> Planned:
    """The request `number` of an engine life."""
    phase = random.Random(f"{mix.seed}/{life}/phase {number // BLOCK}")
    burst, drain = phase.random() < mix.burst, phase.random() < mix.drain
    rng = random.Random(f"{mix.seed}/{life}/{number}")
    first = number % BLOCK == 0
    gap = 0.0 if burst and not first else rng.expovariate(mix.rate)
    abort_tokens = abort_seconds = None
    if rng.random() < mix.abort:
        if rng.random() < 0.6:
            # The tokens of an answer come one by one, so this is a place in it.
            abort_tokens = rng.randint(1, max(1, mix.output[1] // 2))
        else:
            abort_seconds = rng.choice([0.0, 0.001, 0.01, 0.1, 0.5])
    if mix.pool:
        asked = pool_request(mix, pool_index(mix, life, number))
        prompt, params = asked.prompt, asked.params
    else:
        prompt, params = _ask(mix, rng)
    return Planned(number, gap, drain and first, prompt, params, abort_tokens, abort_seconds)


def pool_index(mix: Mix, life: int, number: int) -> int:
    """Which of the pool's requests this one is."""
    return random.Random(f"{mix.seed}/{life}/{number}/pool").randrange(mix.pool)


def pool_request(mix: Mix, index: int) -> Planned:
    """One of the different requests of a plan with a pool."""
    prompt, params = _ask(mix, random.Random(f"{mix.seed}/pool/{index}"))
    return Planned(index, 0.0, False, prompt, params)


def _ask(mix: Mix, rng: random.Random) -> tuple[tuple[int, ...], dict[str, Any]]:
    length = rng.randint(*mix.prompt) if rng.random() < 0.8 else mix.prompt[rng.random() < 0.3]
    # Tokens at either end of a vocabulary tend to be special.
    low, high = min(8, mix.vocabulary // 2), mix.vocabulary
    prompt = [rng.randrange(low, high) for _ in range(length)]
    if rng.random() < mix.prefix:
        shared = random.Random(f"{mix.seed}/prefix/{rng.randrange(3)}")
        take = rng.randint(0, length - 1)
        prompt[:take] = [shared.randrange(low, high) for _ in range(take)]
    params: dict[str, Any] = {"max_tokens": rng.randint(*mix.output), "temperature": 0.0, "ignore_eos": True}
    if rng.random() < mix.structured:
        # A word of this many letters, and the end token after it.
        letters = rng.randint(1, max(1, min(30, mix.output[1] - 1)))
        return tuple(prompt), {**params, "ignore_eos": False, "letters": letters, "max_tokens": letters + 1}
    if rng.random() < mix.stop:
        params["stop_token_ids"] = rng.sample(range(low, high), min(rng.choice([1, 30, 90]), high - low))
        params["ignore_eos"] = False
        if rng.random() < 0.5:
            params["min_tokens"] = rng.randint(1, params["max_tokens"])
    if rng.random() < mix.sampling:
        params |= _sampling_options(rng, low, high)
    if mix.drafts:
        params = {name: value for name, value in params.items() if name not in ("min_p", "logit_bias")}
    return tuple(prompt), params


def _sampling_options(rng: random.Random, low: int, high: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.6:
        options |= {"temperature": rng.choice([0.3, 0.7, 1.0]), "seed": rng.randrange(1 << 31)}
        options |= rng.choice([{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.5}])
    if rng.random() < 0.5:
        options |= rng.choice(
            [
                {"repetition_penalty": 1.3},
                {"frequency_penalty": 1.7, "presence_penalty": 0.9},
                {"logit_bias": {str(token): -90.0 for token in rng.sample(range(low, high), 300)}},
                {"allowed_token_ids": sorted(rng.sample(range(low, high), 200))},
                {"logprobs": rng.choice([0, 1, 5])},
            ]
        )
    return options


def concurrent_with(spans: dict[int, tuple[float, float]], failed: Sequence[int]) -> list[int]:
    """The requests that were in the engine together with one of `failed`, in their order."""
    found = []
    for number, (begin, end) in sorted(spans.items()):
        if any(begin <= spans[other][1] and spans[other][0] <= end for other in failed if other in spans):
            found.append(number)
    return found
