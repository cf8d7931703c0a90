"""The short way of sampling: taken where every request decodes greedily and wants no more, and nowhere else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS

from vllm_handoff.worker.greedy_sampler import GreedySampler, greedy_sampler

SLOTS = 8


class Vllms:
    """Stands for vLLM's sampler: keeps the flags that it would, and says when it is asked."""

    LONG = "vLLM's own way"

    @staticmethod
    def init(self: Any, **options: Any) -> None:
        self.compute_nans = options.get("compute_nans", False)
        self.return_sampling_mask = options.get("return_sampling_mask", False)
        self.trace_replay_state = options.get("trace_replay_state")
        self.needs_logits_processing = np.zeros(SLOTS, dtype=bool)
        self.sampling_states = SimpleNamespace(num_logprobs=np.full(SLOTS, NO_LOGPROBS))

    @staticmethod
    def add_request(self: Any, slot: int, params: SamplingParams) -> None:
        self.needs_logits_processing[slot] = params.presence_penalty != 0
        self.sampling_states.num_logprobs[slot] = NO_LOGPROBS if params.logprobs is None else params.logprobs

    @staticmethod
    def call(self: Any, logits: torch.Tensor, batch: Any) -> str:
        return Vllms.LONG


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Sampler, "__init__", Vllms.init)
    monkeypatch.setattr(Sampler, "add_request", Vllms.add_request)
    monkeypatch.setattr(Sampler, "__call__", Vllms.call)

    def build(drafts: bool = False, **options: Any) -> GreedySampler:
        config = SimpleNamespace(speculative_config=object() if drafts else None)
        sampler = GreedySampler(vllm_config=config, max_num_reqs=SLOTS, device=torch.device("cpu"), **options)
        sampler.shortens = True
        return sampler

    return build


def sample(sampler: GreedySampler, *params: SamplingParams, has_prefill: bool = False, rows: int | None = None) -> Any:
    """Sample for requests in slots from the last one down."""
    slots = np.arange(SLOTS - 1, SLOTS - 1 - len(params), -1)
    for slot, one in zip(slots, params, strict=True):
        sampler.add_request(slot, one)
    logits = torch.zeros(rows or len(params), 30, dtype=torch.bfloat16)
    logits[:, 7:] = 1.0
    logits[0, 20:] = 2.0
    batch = SimpleNamespace(num_reqs=len(params), idx_mapping_np=slots, has_prefill=has_prefill)
    return sampler(logits, batch)


GREEDY = SamplingParams(temperature=0.0)


def test_greedy_requests_get_the_first_of_the_largest_logits(make: Any) -> None:
    output = sample(make(), GREEDY, GREEDY, SamplingParams(temperature=0.0, top_p=0.5, top_k=3, seed=5))
    assert output.sampled_token_ids.tolist() == [[20], [7], [7]]
    assert output.sampled_token_ids.dtype == torch.int64
    assert (output.num_sampled.tolist(), output.num_rejected.tolist()) == ([1, 1, 1], [0, 0, 0])
    assert output.num_sampled.dtype == output.num_rejected.dtype == torch.int32
    assert output.logprobs_tensors is None and output.num_nans is None and output.sampling_mask_tensors is None


@pytest.mark.parametrize(
    "other",
    [
        dict(temperature=1.0),
        dict(temperature=0.0, logprobs=0),
        dict(temperature=0.0, logprob_token_ids=[1, 2]),
        dict(temperature=0.0, presence_penalty=1.0),
    ],
)
def test_one_request_that_wants_more_is_enough_for_vllms_own_way(make: Any, other: dict[str, Any]) -> None:
    sampler = make()
    assert sample(sampler, GREEDY, SamplingParams(**other)) == Vllms.LONG
    # A slot is what its newest request is.
    assert sample(sampler, GREEDY, GREEDY) != Vllms.LONG


def test_rounds_with_prefill_or_drafts_go_vllms_own_way(make: Any) -> None:
    assert sample(make(), GREEDY, has_prefill=True) == Vllms.LONG
    assert sample(make(), GREEDY, rows=4) == Vllms.LONG
    assert sample(make(drafts=True), GREEDY) == Vllms.LONG


@pytest.mark.parametrize("option", ["compute_nans", "return_sampling_mask", "trace_replay_state"])
def test_so_do_engines_that_want_more_of_every_sample(make: Any, option: str) -> None:
    assert sample(make(**{option: True}), GREEDY) == Vllms.LONG


def test_and_warm_up_does(make: Any) -> None:
    sampler = make()
    sampler.shortens = False
    assert sample(sampler, GREEDY) == Vllms.LONG


def test_a_runner_makes_it_instead_of_vllms() -> None:
    from vllm.v1.worker.gpu import model_runner

    with greedy_sampler():
        assert model_runner.Sampler is GreedySampler
    assert model_runner.Sampler is Sampler
