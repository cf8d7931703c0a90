"""What the model runner leaves out of a round, and what it must not."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu import async_utils, model_runner
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_handoff.worker.runner import ManifestRunnerMixin


class UsersProcessor(LogitsProcessor):
    def apply(self, logits: Any, ctx: Any) -> Any:
        return logits


class UsersSampler(Sampler):
    pass


class Base:
    """Stands for vLLM's runner."""

    def __init__(self) -> None:
        self.added = 0

    def add_requests(self, scheduler_output: Any) -> None:
        self.added += 1


class Runner(ManifestRunnerMixin, Base):
    pp_handler = None

    def __init__(self, sampler: Any) -> None:
        Base.__init__(self)
        self.sampler = sampler


def sampler(kind: type, *processors: type) -> Any:
    made = object.__new__(kind)
    made.logits_processors = [object.__new__(processor) for processor in processors]
    return made


@pytest.mark.parametrize(
    ("held", "calls"),
    [
        (None, 0),
        (sampler(Sampler, BadWordsState), 0),
        (sampler(Sampler, BadWordsState, UsersProcessor), 1),
        (sampler(UsersSampler, BadWordsState), 1),
    ],
)
def test_a_round_that_adds_nobody_is_left_out_for_vllms_own_sampler_alone(held: Any, calls: int) -> None:
    runner = Runner(held)
    runner.add_requests(SimpleNamespace(scheduled_new_reqs=[]))
    assert runner.added == calls
    runner.add_requests(SimpleNamespace(scheduled_new_reqs=[object()]))
    assert runner.added == calls + 1


def test_vllms_outputs_can_be_asked_whether_they_have_arrived() -> None:
    for cls in (async_utils.AsyncOutput, async_utils.AsyncPoolingOutput):
        assert "self.copy_event.record(copy_stream)" in inspect.getsource(cls.__init__)


def test_vllms_dummy_round_can_have_context() -> None:
    """What the stage's clock asks of it at start, on a GPU."""
    parameters = inspect.signature(model_runner.GPUModelRunner._dummy_run).parameters
    assert {"uniform_decode", "context_len", "skip_eplb"} <= parameters.keys()
    assert callable(torch.cuda._sleep)
