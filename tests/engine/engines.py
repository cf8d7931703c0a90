"""The engines that tests run on, and how an answer is compared with the reference."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import driver
from driver import Details, Run
from engine_process import EngineProcess
from requests_and_answers import Answer, Arrival, Ask

EXECUTOR = "vllm_handoff.executor.HandoffExecutor"
# The scheduler and the executor live in the process of the test's functions, and request ids are the test's own.
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}

SMALL = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_seqs": 16,
    "seed": 0,
    # A model with random weights would go on with spaces for ever.
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
}


class Engine(NamedTuple):
    """Engine arguments with a name, to parametrize the fixture `engine` with."""

    name: str
    args: dict[str, Any]


def two_stages(name: str, **args: Any) -> Engine:
    """Our executor at PP=2, asynchronous unless `args` say otherwise."""
    return Engine(name, {"pipeline_parallel_size": 2, "distributed_executor_backend": EXECUTOR, **args})


def on(engine: Engine) -> pytest.MarkDecorator:
    """Run a test on this engine.

    One each, since pytest groups tests by the place of a parameter in its list,
    not by its value, and would start an engine again for every group.
    """
    return pytest.mark.parametrize("engine", [engine], indirect=True, ids=[engine.name])


@contextlib.contextmanager
def running(folder: Path, start: Callable[..., None], **args: Any) -> Iterator[EngineProcess]:
    """An engine started by `start(state, **args)` in a process of its own, which has to leave nothing behind."""
    process = EngineProcess(folder, IN_PROCESS)
    try:
        process.run(start, **args)
        yield process
        process.run(driver.end)
        assert process.children() == set()
        process.stop()
    finally:
        process.kill()


class Reference:
    """vLLM's own answers: its executor, its V1 runner, one process, one stage, synchronous scheduling.

    The engine starts when it is first asked, and each request runs once.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._model = model
        self._process: EngineProcess | None = None
        self._answers: dict[Ask, Answer] = {}

    def __call__(self, asks: Sequence[Ask]) -> list[Answer]:
        new = list(dict.fromkeys(ask for ask in asks if ask not in self._answers))
        if new:
            self._answers.update(zip(new, self._run(driver.generate, new), strict=True))
        return [self._answers[ask] for ask in asks]

    def details(self, asks: Sequence[Ask]) -> list[Details]:
        """The same with all that comes back, not kept."""
        return self._run(driver.complete, asks)

    def _run(self, function: Callable[..., Any], asks: Sequence[Ask]) -> Any:
        if self._process is None:
            # Its ranks of logprobs would be compiled, which takes half a minute.
            self._process = EngineProcess(self._folder, {**IN_PROCESS, "TORCHDYNAMO_DISABLE": "1"})
            args = {"distributed_executor_backend": "uni", "async_scheduling": False}
            self._process.run(driver.start, model=str(self._model), **SMALL, **args)
        return self._process.run(function, asks)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()


def check(run: Run, arrivals: Sequence[Arrival], reference: Reference) -> None:
    """Every answer is the reference's; that of an aborted request, its beginning."""
    expected = reference([arrival.ask for arrival in arrivals])
    for arrival, found, aborted, wanted in zip(arrivals, run.answers, run.aborted, expected, strict=True):
        if aborted:
            assert found.token_ids == wanted.token_ids[: len(found.token_ids)], arrival.req_id
        else:
            assert found == wanted, arrival.req_id
