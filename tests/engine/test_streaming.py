"""AsyncLLM: the engine in a process of its own, answers streamed in pieces."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from driver import State
from engine_process import EngineProcess
from engines import SMALL, Reference, two_stages
from requests_and_answers import Answer, Arrival, over_time

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
