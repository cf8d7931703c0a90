"""What runs inside an engine's process: start it, drive it step by step, watch its rounds."""

from __future__ import annotations

import ast
import gc
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from requests_and_answers import Answer, Arrival, Ask

State = dict[str, Any]

SAMPLES_A_SECOND = 16_000


class Completion(NamedTuple):
    """One of the n completions of a request; logprobs as {token: (logprob, rank)} for each position."""

    token_ids: tuple[int, ...]
    finish_reason: str | None
    text: str
    logprobs: list[dict[int, tuple[float, int]]] | None


class Details(NamedTuple):
    """All that came back for a request."""

    completions: list[Completion]
    prompt_logprobs: list[dict[int, tuple[float, int]] | None] | None


class RoundSeen(NamedTuple):
    """A round as the scheduler planned it."""

    number: int
    scheduled: dict[str, int]  # request id -> tokens
    admitted: tuple[str, ...]  # requests that are new to the workers
    preempted: tuple[str, ...]
    handoff: bool
    in_flight: int  # rounds planned before it whose outputs were not collected yet
    in_flight_of: dict[str, int]  # the same, of each of its requests


class Run(NamedTuple):
    """All that came out of one drive(), in the order of the arrivals."""

    answers: list[Answer]
    aborted: list[bool]
    rounds: list[RoundSeen]

    @property
    def preemptions(self) -> int:
        return sum(len(seen.preempted) for seen in self.rounds)


def start(state: State, **engine_args: Any) -> None:
    """Start an engine whose scheduler and executor live in this process."""
    from vllm import LLM

    state["llm"] = LLM(disable_log_stats=True, **engine_args)


def end(state: State) -> None:
    """Let go of the engine, as a user does who needs it no more."""
    del state["llm"]
    gc.collect()


def core(state: State) -> Any:
    """vLLM's EngineCore."""
    return state["llm"].llm_engine.engine_core.engine_core


def generate(state: State, asks: Sequence[Ask]) -> list[Answer]:
    """Answers to requests that all arrive at once, through LLM.generate."""
    outputs = state["llm"].generate([_prompt(ask) for ask in asks], [_params(ask) for ask in asks], use_tqdm=False)
    return [_answer(output) for output in outputs]


def texts(state: State, answers: Sequence[Answer]) -> list[str]:
    """The answers' own texts. Answer.text may begin with what is left of a prompt that ends within a character."""
    tokenizer = state["llm"].get_tokenizer()
    return [tokenizer.decode(answer.token_ids, skip_special_tokens=True) for answer in answers]


def complete(state: State, asks: Sequence[Ask]) -> list[Details]:
    """Like generate(), with everything that an output has."""
    outputs = state["llm"].generate([_prompt(ask) for ask in asks], [_params(ask) for ask in asks], use_tqdm=False)
    return [
        Details(
            [
                Completion(tuple(c.token_ids), c.finish_reason, c.text, c.logprobs and [_plain(p) for p in c.logprobs])
                for c in output.outputs
            ],
            output.prompt_logprobs and [position and _plain(position) for position in output.prompt_logprobs],
        )
        for output in outputs
    ]


def _prompt(ask: Ask) -> Any:
    prompt: dict[str, Any] = {"prompt_token_ids": list(ask.prompt)}
    if ask.sounds:
        sounds = [np.random.default_rng(length).normal(size=length).astype(np.float32) for length in ask.sounds]
        prompt["multi_modal_data"] = {"audio": [(sound, SAMPLES_A_SECOND) for sound in sounds]}
    return prompt


def _plain(position: Any) -> dict[int, tuple[float, int]]:
    return {token: (entry.logprob, entry.rank) for token, entry in position.items()}


def drive(state: State, arrivals: Sequence[Arrival], most_steps: int = 20_000) -> Run:
    """Step the engine while requests arrive and leave, until none is left and no round is in flight.

    An arrival whose id is in use waits until that request is over, and takes its place at once.
    """
    engine, watch = state["llm"].llm_engine, _Watch(core(state))
    waiting = deque(sorted(range(len(arrivals)), key=lambda index: arrivals[index].step))
    alive: dict[str, tuple[int, int]] = {}  # request id -> (index of its arrival, step at which it came)
    answers = [Answer((), None)] * len(arrivals)
    aborted = [False] * len(arrivals)

    def abort(step: int) -> None:
        for req_id, (index, since) in list(alive.items()):
            if _is_over(arrivals[index], step - since, len(answers[index].token_ids)):
                engine.abort_request([req_id])
                del alive[req_id]
                aborted[index] = True

    with watch:
        for step in range(most_steps):
            abort(step)
            while waiting and arrivals[waiting[0]].step <= step and arrivals[waiting[0]].req_id not in alive:
                index = waiting.popleft()
                req_id, ask = arrivals[index].req_id, arrivals[index].ask
                engine.add_request(req_id, _prompt(ask), _params(ask))
                alive[req_id] = index, step
            abort(step)
            if not (alive or waiting or watch.busy()):
                return Run(answers, aborted, watch.rounds)
            if not watch.busy():
                continue
            for output in engine.step():
                index, _ = alive[output.request_id]
                answers[index] = _answer(output)
                if output.finished:
                    del alive[output.request_id]
    raise AssertionError(f"not done after {most_steps} steps; left: {sorted(alive)}")


def _is_over(arrival: Arrival, steps: int, tokens: int) -> bool:
    if arrival.abort_after is not None and tokens >= arrival.abort_after:
        return True
    return arrival.abort_steps is not None and steps >= arrival.abort_steps


def _params(ask: Ask) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    values = ast.literal_eval(ask.params)
    if "structured_outputs" in values:
        values["structured_outputs"] = StructuredOutputsParams(**values["structured_outputs"])
    return SamplingParams(**values)


def _answer(output: Any) -> Answer:
    (completion,) = output.outputs
    return Answer(tuple(completion.token_ids), completion.finish_reason, completion.stop_reason, completion.text)


class _Watch:
    """Records the rounds of an engine while it is entered."""

    def __init__(self, engine_core: Any) -> None:
        self._core = engine_core
        self._scheduler = engine_core.scheduler
        self.rounds: list[RoundSeen] = []
        self._in_flight: list[tuple[Any, dict[str, int]]] = []

    def busy(self) -> bool:
        """Whether the engine would go on stepping."""
        return bool(self._scheduler.has_requests() or self._core.batch_queue)

    def __enter__(self) -> None:
        # As attributes of the object, they shadow the methods of its class.
        self._scheduler.schedule = self._schedule
        self._scheduler.update_from_output = self._update_from_output

    def __exit__(self, *_: object) -> None:
        del self._scheduler.schedule, self._scheduler.update_from_output

    def _schedule(self, *args: Any) -> Any:
        from vllm_handoff.scheduler_ext.manifest import manifest_of

        output = type(self._scheduler).schedule(self._scheduler, *args)
        manifest = manifest_of(output)
        scheduled = dict(output.num_scheduled_tokens)
        self.rounds.append(
            RoundSeen(
                number=-1 if manifest is None else manifest.round,
                scheduled=scheduled,
                admitted=tuple(new.req_id for new in output.scheduled_new_reqs),
                preempted=tuple(sorted(output.preempted_req_ids or ())),
                handoff=manifest is not None and manifest.handoff,
                in_flight=len(self._in_flight),
                in_flight_of={req_id: sum(req_id in ids for _, ids in self._in_flight) for req_id in scheduled},
            )
        )
        self._in_flight.append((output, scheduled))
        return output

    def _update_from_output(self, scheduler_output: Any, model_output: Any) -> Any:
        self._in_flight = [entry for entry in self._in_flight if entry[0] is not scheduler_output]
        return type(self._scheduler).update_from_output(self._scheduler, scheduler_output, model_output)


def timelines(state: State) -> list[list[tuple[int, int, int]]]:
    """Per rank, (round, begin_ns, end_ns) of its last rounds."""
    return state["llm"].collective_rpc("handoff_timeline")


def executor_stats(state: State) -> dict[str, int]:
    """The executor's counts so far."""
    import msgspec

    return msgspec.structs.asdict(core(state).model_executor.stats())
