"""The harness's own checks: a planted lost, doubled or swapped token is found, and called by its name."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from vllm_handoff.executor import cli
from vllm_handoff.stress import child, stress, toy_tokens
from vllm_handoff.stress.checks import ERROR, LEFT, Expected, check
from vllm_handoff.stress.figures import Figures
from vllm_handoff.stress.plan import Case, Mix, Planned, concurrent_with, planned
from vllm_handoff.stress.session import Session
from vllm_handoff.stress.shrink import shrink

PARAMS = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
REQUEST = Planned(5, 0.0, False, (17, 300, 4000), PARAMS)
OTHER = (99, 98, 97)


def right(prompt: tuple[int, ...] = REQUEST.prompt) -> list[int]:
    return toy_tokens.answer(prompt, PARAMS, layers=2, context=512)[0]


def kind(tokens: list[int], finish: str = "length", others: tuple[int, ...] = ()) -> str | None:
    problem = check(REQUEST, Expected(right(), "length"), tokens, finish, others)
    return None if problem is None else problem.kind


def test_what_is_right_is_no_problem() -> None:
    assert kind(right()) is None
    for count in range(31):
        # Of a client that has left, and of one that an injected fault has struck, the beginning counts.
        assert kind(right()[:count], LEFT) is None


@pytest.mark.parametrize("place", [0, 1, 7, 28])
def test_a_lost_token(place: int) -> None:
    tokens = right()
    assert kind(tokens[:place] + tokens[place + 1 :]) == "lost"
    assert kind(tokens[:place] + tokens[place + 1 :], LEFT) == "lost"


@pytest.mark.parametrize("place", [0, 1, 7, 29])
def test_a_doubled_token(place: int) -> None:
    tokens = right()
    assert kind(tokens[: place + 1] + tokens[place:]) == "doubled"


@pytest.mark.parametrize("place", [0, 7, 29])
def test_a_token_of_another_request(place: int) -> None:
    tokens, others = right(), right(OTHER)
    tokens[place] = others[place]
    assert kind(tokens, others=tuple(others)) == "swapped"


def test_the_last_token_lost_and_the_wrong_end() -> None:
    assert kind(right()[:-1]) == "short"
    assert kind(right(), "stop") == "finish"
    assert kind([*right(), 4]) == "long"


def test_a_wrong_token_in_the_models_history_changes_all_that_follow() -> None:
    rng = random.Random(1)
    for _ in range(50):
        prompt = [rng.randrange(toy_tokens.VOCABULARY) for _ in range(rng.randint(2, 60))]
        wrong = list(prompt)
        wrong[rng.choice([0, len(prompt) - 1])] ^= 1
        answers = [toy_tokens.answer(p, PARAMS, layers=2, context=512)[0] for p in (prompt, wrong)]
        assert sum(a == b for a, b in zip(*answers, strict=True)) < 5


def test_sampling_options_have_one_outcome() -> None:
    due, tokens = 100, [5, 100, 101]

    def choose(**params: object) -> int:
        return toy_tokens.choose(due, tokens, 1, params)

    assert choose(temperature=0.7, top_k=3) == 100
    assert choose(repetition_penalty=1.3) == 102
    assert choose(logit_bias={"100": -90.0}) == 101
    assert choose(allowed_token_ids=[7, 90, 4000]) == 4000
    assert choose(min_tokens=3, stop_token_ids=[100, 101]) == 102
    assert choose(min_tokens=2, stop_token_ids=[100, 101]) == 100


def test_a_word_for_the_grammar() -> None:
    tokens, finish = toy_tokens.answer((7, 8), {**PARAMS, "ignore_eos": False, "letters": 6}, layers=2, context=512)
    assert finish == "stop" and len(tokens) == 7 and tokens[-1] == toy_tokens.END_TOKEN
    assert all(token in toy_tokens.LETTERS for token in tokens[:-1])


def test_a_plan_is_a_function_of_its_seed() -> None:
    mix = Mix(seed=3)
    assert [planned(mix, 1, n) for n in range(50)] == [planned(mix, 1, n) for n in range(50)]
    assert planned(mix, 1, 5) != planned(mix, 2, 5) != planned(Mix(seed=4), 2, 5)
    case = Case(mix, 1, (4, 9))
    assert Case.of(case.to_json()) == case
    assert [request.number for request in case.requests()] == [4, 9]


class _Life:
    """Plays events to a session."""

    def __init__(self, events: list[dict]) -> None:
        self._events = events

    def order(self, order: dict) -> None:
        pass

    def event(self, timeout: float) -> dict | None:
        return self._events.pop(0) if self._events else None


def session_of(case: Case, change: dict[int, list[int]], finish: str = "length") -> Session:
    """A session in which these requests came back as given, and all others right."""

    def oracle(case: Case, request: Planned) -> Expected:
        return Expected(*toy_tokens.answer(request.prompt, request.params, layers=2, context=512))

    events: list[dict] = [{"sent": number, "at": 0.0} for number in case.numbers or ()]
    for number in case.numbers or ():
        tokens, reason = oracle(case, case.request(number))
        if number in change:
            tokens, reason = change[number], finish
        events.append({"ended": number, "tokens": tokens, "finish": reason, "at": 1.0, "error": "planted"})
    session = Session(_Life([*events, {"done": True}]), case, oracle, Figures())
    session.follow(float("inf"))
    return session


CASE = Case(Mix(seed=1, abort=0.0, sampling=0.0, stop=0.0, output=(20, 40)), 0, tuple(range(10)))


def test_a_session_finds_two_swapped_tokens() -> None:
    assert session_of(CASE, {}).problems == []
    answers = [toy_tokens.answer(CASE.request(n).prompt, CASE.request(n).params, 2, 512)[0] for n in (3, 4)]
    answers[0][6], answers[1][6] = answers[1][6], answers[0][6]
    problems = session_of(CASE, {3: answers[0], 4: answers[1]}).problems
    assert problems[0].kind == "swapped" and problems[0].number == 3


def test_an_error_is_a_problem_unless_a_fault_was_injected() -> None:
    assert [problem.kind for problem in session_of(CASE, {2: []}, ERROR).problems] == ["error"]


def test_shrinking_finds_the_two_requests_that_it_takes() -> None:
    tried: list[int] = []

    def fails(case: Case, seconds: float) -> list:
        numbers = case.numbers or ()
        tried.append(len(numbers))
        return ["problem"] if {3, 17} <= set(numbers) else []

    whole = Case(Mix(), 0, tuple(range(40)))
    found, problems = shrink(whole, fails, first=list(range(30)), seconds=60)
    assert found.numbers == (3, 17) and problems == ["problem"]
    assert len(tried) < 80


def test_shrinking_what_does_not_fail_again() -> None:
    whole = Case(Mix(), 0, tuple(range(40)))
    assert shrink(whole, lambda case, seconds: [], first=[1, 2], seconds=60) == (whole, [])


def test_what_was_about_at_the_same_time() -> None:
    spans = {1: (0.0, 1.0), 2: (0.5, 2.0), 3: (1.5, 3.0), 4: (2.5, 4.0)}
    assert concurrent_with(spans, [2]) == [1, 2, 3]


def test_an_engine_with_drafts_is_not_asked_for_what_it_refuses() -> None:
    plain, drafting = Mix(sampling=1.0), Mix(sampling=1.0, drafts=True)
    asked = [planned(plain, 0, number) for number in range(200)]
    assert {"min_p", "logit_bias"} <= {name for request in asked for name in request.params}
    for request in asked:
        kept = {name: value for name, value in request.params.items() if name not in ("min_p", "logit_bias")}
        assert planned(drafting, 0, request.number).params == kept


def test_lengths_that_the_toy_cannot_hold_are_refused_before_anything_starts(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["stress", "--prompt", "1", "600"]) == 2
    assert "do not fit the toy's context of 512" in capsys.readouterr().err


def test_a_fault_that_needs_a_gpu_is_refused_on_a_cpu(
    capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stress, "_on_cpu", lambda: True)
    assert cli.main(["stress", "--faults", "kill", "kernel"]) == 2
    assert "--faults kernel needs a GPU" in capsys.readouterr().err


class Prompt:
    """A client whose engine answers at once."""

    preemptions = 0

    def __init__(self, *_: object) -> None:
        pass

    async def call(self, *_: object) -> list[dict]:
        return []

    async def stream(self, *_: object) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(token_ids=[1], finish_reason="length")

    async def close(self) -> None:
        pass


@pytest.mark.timeout(60)
def test_an_order_to_stop_right_behind_the_order_to_run_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "EngineClient", Prompt)
    (orders, give), (told, events) = os.pipe(), os.pipe()
    served = child.Child({"options": {}, "toy": True}, events)
    with os.fdopen(orders) as stdin, os.fdopen(told) as heard:
        monkeypatch.setattr("sys.stdin", stdin)
        serving = threading.Thread(target=lambda: asyncio.run(served.serve()))
        serving.start()
        assert "ready" in heard.readline()
        with os.fdopen(give, "w") as orderer:
            # In one piece, so that both are there before the load can begin.
            for order in ({"run": Case(Mix(rate=1000.0), 0).to_json()}, {"stop": True}):
                orderer.write(json.dumps(order) + "\n")
            orderer.flush()
            seen = [{}]
            while "done" not in seen[-1]:
                seen.append(json.loads(heard.readline()))
                assert len(seen) < 100, "it goes on sending"
        # The end of the orders is one to quit.
        serving.join()


def test_memory_growth_is_that_of_the_process_that_grew_most() -> None:
    figures = Figures()
    figures.note_memory({1: 500, 2: 500}, {1: 600, 2: 500}, seconds=1)
    assert figures.to_json()["memory_growth"] is None
    assert "memory, MB a minute                        -" in figures.table()
    # One has ended since, one is new.
    figures.note_memory({1: 10_000_000, 2: 0, 3: 9}, {1: 12_000_000, 2: 1_000_000, 4: 10**9}, seconds=60)
    figures.note_memory({5: 10_000_000}, {5: 9_000_000}, seconds=60)
    assert figures.memory_growth == 2_000_000 and "2.00" in figures.table()
