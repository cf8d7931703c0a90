"""Engines in processes of their own, and vLLM's own answers to compare with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import driver
from engine_process import EngineProcess
from engines import IN_PROCESS, SMALL, Reference, running
from requests_and_answers import Answer, Ask


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """A running engine with the arguments of an Engine. Tests of one module that name the same one share it."""
    args = {"model": str(tiny_llama), **SMALL, **request.param.args}
    with running(tmp_path_factory.mktemp("engine"), driver.start, **args) as process:
        yield process


@pytest.fixture(scope="session")
def reference(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reference]:
    """vLLM's own answers: its executor, its V1 runner, one process, one stage, synchronous scheduling."""
    known: dict[Ask, Answer] = {}
    processes: list[EngineProcess] = []

    def answers(asks: Sequence[Ask]) -> list[Answer]:
        new = list(dict.fromkeys(ask for ask in asks if ask not in known))
        if new:
            if not processes:
                processes.append(EngineProcess(tmp_path_factory.mktemp("reference"), IN_PROCESS))
                args = {"distributed_executor_backend": "uni", "async_scheduling": False}
                processes[0].run(driver.start, model=str(tiny_llama), **SMALL, **args)
            known.update(zip(new, processes[0].run(driver.generate, new), strict=True))
        return [known[ask] for ask in asks]

    yield answers
    for process in processes:
        process.kill()
