"""Engines in processes of their own, and vLLM's own answers to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import driver
from engine_process import EngineProcess
from engines import SMALL, Reference, running


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
    """What every answer is compared with."""
    reference = Reference(tmp_path_factory.mktemp("reference"), tiny_llama)
    yield reference
    reference.close()
