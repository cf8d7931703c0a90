"""Bad input gets a clear error, in seconds, and leaves nothing behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import driver
from engine_process import EngineProcess, EngineProcessError
from engines import EXECUTOR, IN_PROCESS, SMALL, Reference
from requests_and_answers import greedy, random_prompt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(180)]

TWO_STAGES = {**SMALL, "pipeline_parallel_size": 2, "distributed_executor_backend": EXECUTOR}


@pytest.fixture
def start_fails(tiny_llama: Path, tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts an engine that must not start, and returns the error and the log. Nothing of it is left."""
    made: list[EngineProcess] = []

    def start(environment: dict[str, str] | None = None, **args: Any) -> str:
        process = EngineProcess(tmp_path, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **(environment or {})})
        made.append(process)
        with pytest.raises(EngineProcessError) as caught:
            process.run(driver.start, **{"model": str(tiny_llama), **TWO_STAGES, **args}, timeout=90)
        assert "was not done after" not in str(caught.value)
        # The process that asked for an engine goes on without one.
        assert process.children() == set()
        process.stop()
        return str(caught.value)

    yield start
    for process in made:
        process.kill()


def test_more_stages_than_layers(start_fails: Callable[..., str]) -> None:
    error = start_fails(pipeline_parallel_size=5)
    assert "--pipeline-parallel-size 5 is more than the model has layers (4). Set it to 4 at most." in error


@pytest.mark.parametrize("partition", ["1,1", "4", "2,1,1", "0,4", "two,two"])
def test_a_layer_partition_that_does_not_fit(start_fails: Callable[..., str], partition: str) -> None:
    error = start_fails({"VLLM_PP_LAYER_PARTITION": partition})
    assert (
        f"VLLM_PP_LAYER_PARTITION='{partition}' does not fit: 2 stages need 2 positive numbers that add up to "
        "the model's 4 layers, for instance '1,3'."
    ) in error


def test_a_model_folder_that_is_not_there(start_fails: Callable[..., str], tmp_path: Path) -> None:
    assert str(tmp_path / "nothing") in start_fails(model=str(tmp_path / "nothing"))


def test_a_worker_that_raises_while_starting(start_fails: Callable[..., str]) -> None:
    error = start_fails(worker_cls="user_classes.WorkerThatCannotStart")
    # Where, what, and the traceback, although the other rank then waits for this one in vain.
    assert "WorkerStartError: The workers could not start: " in error
    assert "rank 1 (stage 1): OSError: the disk is on fire" in error
    assert 'raise OSError("the disk is on fire")' in error


def test_an_engine_that_fails_after_its_workers_have_started(start_fails: Callable[..., str]) -> None:
    # vLLM's own error, when the workers are up: one block, and a request may need sixteen.
    error = start_fails(block_size=32, kv_cache_memory_bytes=32 * 1024)
    assert "max seq len" in error or "KV cache" in error


def test_an_uneven_layer_partition(
    tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, reference: Reference
) -> None:
    """One that does fit: each stage has its layers, and the answers are the same."""
    asks = [greedy(random_prompt(random.Random(n), 5 + n), 12) for n in range(8)]
    process = EngineProcess(tmp_path_factory.mktemp("uneven"), {**IN_PROCESS, "VLLM_PP_LAYER_PARTITION": "3,1"})
    try:
        process.run(driver.start, model=str(tiny_llama), **TWO_STAGES)
        assert process.run(driver.generate, asks) == reference(asks)
        assert process.run(layers_of_stages) == [3, 1]
        process.stop()
    finally:
        process.kill()


def layers_of_stages(state: driver.State) -> list[int]:
    """How many layers each rank holds weights of."""
    return state["llm"].collective_rpc(_count_layers)


def _count_layers(worker: Any) -> int:
    names = [name for name, _ in worker.get_model().named_parameters() if ".layers." in name]
    return len({name.split(".layers.")[1].split(".")[0] for name in names})
