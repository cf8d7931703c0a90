"""AsyncLLM: the engine in a process of its own, answers streamed in pieces."""

from __future__ import annotations

import ast
import asyncio
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from driver import State
from engine_process import EngineProcess
from engines import SMALL, Reference, two_stages
from requests_and_answers import Answer, Arrival, greedy, over_time, random_prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]


def start_async(state: State, **args: Any) -> None:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    state["loop"] = asyncio.new_event_loop()

    async def start() -> AsyncLLM:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**args))

    state["engine"] = state["loop"].run_until_complete(start())


def stop_async(state: State) -> None:
    state.pop("engine").shutdown()
    state.pop("loop").close()


def stream(state: State, arrivals: Sequence[Arrival], step_s: float) -> list[tuple[Answer, int, bool]]:
    """Each answer, put together from its pieces; how many pieces; and whether its client went away."""
    return state["loop"].run_until_complete(_stream_all(state["engine"], arrivals, step_s))


async def _stream_all(engine: Any, arrivals: Sequence[Arrival], step_s: float) -> list[tuple[Answer, int, bool]]:
    return list(await asyncio.gather(*(_stream(engine, arrival, step_s) for arrival in arrivals)))


async def _stream(engine: Any, arrival: Arrival, step_s: float) -> tuple[Answer, int, bool]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    await asyncio.sleep(arrival.step * step_s)
    params = SamplingParams(**ast.literal_eval(arrival.ask.params), output_kind=RequestOutputKind.DELTA)
    prompt: Any = {"prompt_token_ids": list(arrival.ask.prompt)}
    token_ids: list[int] = []
    text, pieces = "", 0
    async for output in engine.generate(prompt, params, arrival.req_id):
        (piece,) = output.outputs
        token_ids += piece.token_ids
        text += piece.text
        pieces += 1
        if output.finished:
            return Answer(tuple(token_ids), piece.finish_reason, piece.stop_reason, text), pieces, False
        if arrival.abort_after is not None and len(token_ids) >= arrival.abort_after:
            break  # closes the stream, which aborts the request
    return Answer(tuple(token_ids), None, None, text), pieces, True


class Turn(NamedTuple):
    """One piece of input to a session that stays open, and how many tokens it is answered with."""

    prompt: tuple[int, ...]
    most_tokens: int


def converse(state: State, sessions: Sequence[Sequence[Turn]], patient: Sequence[bool]) -> list[list[int]]:
    """All tokens that each session got. A patient client gives its next input when its last one was answered."""

    async def all_of_them() -> list[list[int]]:
        talks = (_converse(state["engine"], f"session-{n}", *one) for n, one in enumerate(zip(sessions, patient)))
        return list(await asyncio.gather(*talks))

    return state["loop"].run_until_complete(all_of_them())


async def _converse(engine: Any, req_id: str, turns: Sequence[Turn], patient: bool) -> list[int]:
    from vllm import SamplingParams
    from vllm.engine.protocol import StreamingInput
    from vllm.sampling_params import RequestOutputKind

    def params(most_tokens: int) -> SamplingParams:
        return SamplingParams(
            temperature=0.0, max_tokens=most_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )

    token_ids: list[int] = []
    more = asyncio.Event()

    async def inputs() -> AsyncIterator[StreamingInput]:
        due = 0
        for turn in turns:
            yield StreamingInput({"prompt_token_ids": list(turn.prompt)}, params(turn.most_tokens))
            due += turn.most_tokens
            while patient and len(token_ids) < due:
                more.clear()
                await more.wait()

    async for output in engine.generate(inputs(), params(1), req_id):
        token_ids += output.outputs[0].token_ids
        more.set()
    return token_ids


@pytest.fixture(scope="module")
def engine(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    process = EngineProcess(tmp_path_factory.mktemp("streaming"))
    try:
        args = {**SMALL, **two_stages("streaming").args, "max_num_batched_tokens": 64}
        process.run(start_async, model=str(tiny_llama), **args)
        yield process
        process.run(stop_async)
        assert process.children() == set()
        process.stop()
    finally:
        process.kill()


def test_no_token_twice_and_none_missing(engine: EngineProcess, reference: Reference) -> None:
    arrivals = over_time(seed=51, count=48, longest_prompt=200, most_tokens=40, every=2)
    streamed = engine.run(stream, arrivals, step_s=0.005)
    for arrival, (answer, pieces, gone), wanted in zip(
        arrivals, streamed, reference([arrival.ask for arrival in arrivals]), strict=True
    ):
        assert not gone
        assert answer == wanted, arrival.req_id
        assert pieces <= len(wanted.token_ids)
    # Pieces, not whole answers at the end.
    assert sum(pieces for _, pieces, _ in streamed) > 0.5 * sum(len(answer.token_ids) for answer, _, _ in streamed)


def test_clients_that_go_away(engine: EngineProcess, reference: Reference) -> None:
    arrivals = over_time(seed=52, count=40, longest_prompt=100, most_tokens=60, every=1)
    arrivals = [a if n % 3 else a._replace(abort_after=1 + n % 7) for n, a in enumerate(arrivals)]
    streamed = engine.run(stream, arrivals, step_s=0.005)
    for arrival, (answer, _, gone), wanted in zip(
        arrivals, streamed, reference([arrival.ask for arrival in arrivals]), strict=True
    ):
        if gone:
            assert answer.token_ids == wanted.token_ids[: len(answer.token_ids)], arrival.req_id
        else:
            assert answer == wanted, arrival.req_id
    assert sum(gone for _, _, gone in streamed) > 5


def test_sessions_whose_input_comes_in_pieces(engine: EngineProcess, reference: Reference) -> None:
    rng = random.Random(53)
    sessions = [[Turn(random_prompt(rng, rng.randint(1, 90)), rng.randint(1, 24)) for _ in range(3)] for _ in range(12)]
    got = engine.run(converse, sessions, [bool(n % 2) for n in range(len(sessions))])
    # A turn's last token was sampled and never read: vLLM leaves it out of what the next turn goes on from.
    history: list[tuple[int, ...]] = [()] * len(sessions)
    wanted: list[list[int]] = [[] for _ in sessions]
    for turn in range(3):
        history = [before + session[turn].prompt for before, session in zip(history, sessions)]
        asks = [greedy(prompt, session[turn].most_tokens) for prompt, session in zip(history, sessions)]
        for n, answer in enumerate(reference(asks)):
            wanted[n] += answer.token_ids
            history[n] += answer.token_ids[:-1]
    assert got == wanted
