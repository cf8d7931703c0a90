"""Every sampling option: the same tokens on two stages as on one, and as vLLM's own where no chance is involved."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import driver
from driver import Details
from engines import EXECUTOR, SMALL, Reference, running, two_stages
from requests_and_answers import Ask, greedy, random_prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

RNG = random.Random(61)
PROMPTS = [random_prompt(RNG, length) for length in (1, 9, 30, 100, 150)]
ALLOWED = list(range(20, 60))
ENDS = list(range(8, 512, 4))  # vLLM takes 128 at most beside min_tokens

# Without chance: to be compared with vLLM's own runner.
EXACT: dict[str, dict[str, Any]] = {
    "plain": {},
    "presence penalty": {"presence_penalty": 1.5},
    "frequency penalty": {"frequency_penalty": 0.9},
    "repetition penalty": {"repetition_penalty": 1.7},
    "all penalties": {"presence_penalty": 0.5, "frequency_penalty": -0.4, "repetition_penalty": 1.2},
    "logit bias": {"logit_bias": {40: 1.5, 41: -100.0, 99: 1.0}},
    "allowed tokens": {"allowed_token_ids": ALLOWED},
    "min tokens": {"min_tokens": 12, "stop_token_ids": ENDS},
    "logprobs": {"logprobs": 5},
    "penalties and logprobs": {"repetition_penalty": 1.3, "logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 3},
    "top-k of one": {"temperature": 1.0, "top_k": 1},
    "min-p of one": {"temperature": 0.8, "min_p": 1.0},
}
# With chance, but seeded: the same whenever and beside whomever it runs.
SEEDED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.3},
    "top-k": {"temperature": 1.0, "top_k": 7},
    "top-p": {"temperature": 1.2, "top_p": 0.6},
    "min-p": {"temperature": 1.5, "min_p": 0.3},
    "all filters": {"temperature": 0.9, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "bias and allowed tokens": {"temperature": 2.0, "allowed_token_ids": ALLOWED, "logit_bias": {30: 2.0}},
    "logprobs": {"temperature": 1.0, "logprobs": 4},
    "three completions": {"temperature": 1.0, "n": 3},
}
# With chance and without a seed: only what must hold of any answer.
FREE: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.0},
    "allowed tokens": {"temperature": 2.0, "allowed_token_ids": ALLOWED},
    "top-k": {"temperature": 2.0, "top_k": 3, "logprobs": 3},
    "min tokens": {"temperature": 1.0, "min_tokens": 12, "stop_token_ids": ENDS},
    "three completions": {"temperature": 1.0, "n": 3},
}


def _asks(options: dict[str, Any], **more: Any) -> list[Ask]:
    return [greedy(prompt, 24, **options, **more) for prompt in PROMPTS]


def _bad_words(model: Path, reference: Reference) -> list[Ask]:
    """Forbid each prompt's answer a word that it would have."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    asks = []
    for ask, answer in zip(_asks({}), reference(_asks({})), strict=True):
        words = [tokenizer.decode([token]) for token in answer.token_ids]
        word = next(w for w, t in zip(words, answer.token_ids) if w.isalpha() and tokenizer.encode(w).ids == [t])
        asks.append(greedy(ask.prompt, 24, bad_words=[word]))
    return asks


class Compared:
    """What the engines made of all requests at once, and vLLM's own answers."""

    def __init__(self, two: dict[Ask, Details], one: dict[Ask, Details], reference: Reference) -> None:
        self.two = two
        self.one = one
        self.reference = reference

    def check(self, asks: list[Ask], exact: bool) -> list[Details]:
        """Both engines agree on these, and with the reference if `exact`. Their details on two stages."""
        found = [self.two[ask] for ask in asks]
        for wanted in [[self.one[ask] for ask in asks], *([self.reference.details(asks)] if exact else [])]:
            for got, other in zip(found, wanted, strict=True):
                _check_equal(got, other)
        return found


def _check_equal(found: Details, wanted: Details) -> None:
    assert len(found.completions) == len(wanted.completions)
    for got, other in zip(found.completions, wanted.completions, strict=True):
        assert got[:3] == other[:3]
        _check_logprobs(got.logprobs, other.logprobs)
    _check_logprobs(found.prompt_logprobs, wanted.prompt_logprobs)


def _check_logprobs(found: Any, wanted: Any) -> None:
    assert (found is None) == (wanted is None)
    for got, other in zip(found or (), wanted or (), strict=True):
        assert (got is None) == (other is None)
        if got is not None:
            assert got.keys() == other.keys()
            assert {t: rank for t, (_, rank) in got.items()} == {t: rank for t, (_, rank) in other.items()}
            assert [got[t][0] for t in got] == pytest.approx([other[t][0] for t in got], abs=1e-3)


@pytest.fixture(scope="module")
def compared(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, reference: Reference) -> Compared:
    asks = [ask for options in EXACT.values() for ask in _asks(options)]
    asks += [ask for options in SEEDED.values() for ask in _asks(options, seed=7)]
    asks += [ask for options in FREE.values() for ask in _asks(options)]
    asks += _bad_words(tiny_llama, reference)
    found = []
    for args in (two_stages("").args, {"distributed_executor_backend": EXECUTOR}):
        args = {**SMALL, "max_num_batched_tokens": 64, **args}
        with running(tmp_path_factory.mktemp("sampling"), driver.start, model=str(tiny_llama), **args) as process:
            found.append(dict(zip(asks, process.run(driver.complete, asks), strict=True)))
    on_two_stages, on_one_stage = found
    return Compared(on_two_stages, on_one_stage, reference)


@pytest.mark.parametrize("name", EXACT)
def test_without_chance(compared: Compared, name: str) -> None:
    details = compared.check(_asks(EXACT[name]), exact=True)
    plain = [compared.two[ask] for ask in _asks({})]
    if name in ("top-k of one", "min-p of one"):
        assert details == plain
    elif "logprobs" not in name and name != "plain":
        assert details != plain  # the option has an effect, or it would not be tested


@pytest.mark.parametrize("name", SEEDED)
def test_seeded(compared: Compared, name: str) -> None:
    details = compared.check(_asks(SEEDED[name], seed=7), exact=False)
    if name == "three completions":
        for one in details:
            assert len({completion.token_ids for completion in one.completions}) == 3


def test_bad_words(compared: Compared, tiny_llama: Path) -> None:
    asks = _bad_words(tiny_llama, compared.reference)
    details = compared.check(asks, exact=True)
    for got, ask in zip(details, _asks({}), strict=True):
        assert got.completions[0].token_ids != compared.two[ask].completions[0].token_ids


def test_limits_hold_whatever_is_drawn(compared: Compared) -> None:
    for details in (compared.two, compared.one):
        for ask in _asks(FREE["allowed tokens"]):
            assert set(details[ask].completions[0].token_ids) <= set(ALLOWED)
        for ask in _asks(FREE["min tokens"]):
            assert len(details[ask].completions[0].token_ids) >= 12
            assert not set(details[ask].completions[0].token_ids[:12]) & set(ENDS)
        for ask in _asks(FREE["top-k"]):
            completion = details[ask].completions[0]
            assert completion.logprobs
            assert all(p[t][1] <= 3 for t, p in zip(completion.token_ids, completion.logprobs, strict=True))
        for ask in _asks(FREE["three completions"]):
            assert len({completion.token_ids for completion in details[ask].completions}) == 3
    drawn = [compared.two[ask].completions[0].token_ids for ask in _asks(FREE["temperature"])]
    assert drawn != [compared.two[ask].completions[0].token_ids for ask in _asks({})]
