"""vLLM's sampler, with a short way for rounds in which every request decodes greedily."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu import model_runner as v2
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS


class GreedySampler(Sampler):
    """Takes the largest logit where that is all there is to it, and else does what vLLM's does.

    Why: vLLM 0.32 samples greedily as it samples at random, by three kernels
    with noise of no size and some twenty calls around them, which take the last
    stage's host a tenth of a round. With small stages that host sets the pace.
    Same tokens: among equal logits both take the first.

    Attributes:
        shortens: whether the short way may be taken; from the end of warm-up on, so that
            vLLM's kernels are compiled by then all the same.
    """

    def __init__(self, *, vllm_config: Any, max_num_reqs: int, device: torch.device, **others: Any) -> None:
        super().__init__(vllm_config=vllm_config, max_num_reqs=max_num_reqs, device=device, **others)
        self.shortens = False
        self._nothing_else = not (
            self.compute_nans
            or self.return_sampling_mask
            or self.trace_replay_state is not None
            or vllm_config.speculative_config is not None
        )
        self._greedy = np.zeros(max_num_reqs, dtype=bool)
        # What each row sampled, and what was rejected of it: read by others, written by none.
        self._one = torch.ones(max_num_reqs, dtype=torch.int32, device=device)
        self._none = torch.zeros(max_num_reqs, dtype=torch.int32, device=device)

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> None:
        super().add_request(req_idx, sampling_params)
        self._greedy[req_idx] = (
            sampling_params.temperature == 0.0
            and not self.needs_logits_processing[req_idx]
            and self.sampling_states.num_logprobs[req_idx] == NO_LOGPROBS
            and not sampling_params.logprob_token_ids
        )

    def __call__(self, logits: torch.Tensor, input_batch: InputBatch) -> SamplerOutput:
        rows = input_batch.num_reqs
        short = self.shortens and self._nothing_else and not input_batch.has_prefill and logits.shape[0] == rows
        if not (short and self._greedy[input_batch.idx_mapping_np].all()):
            return super().__call__(logits, input_batch)
        return SamplerOutput(
            sampled_token_ids=logits.argmax(dim=-1, keepdim=True),
            logprobs_tensors=None,
            num_nans=None,
            num_sampled=self._one[:rows],
            num_rejected=self._none[:rows],
        )


@contextlib.contextmanager
def greedy_sampler() -> Iterator[None]:
    """While a runner loads its model, the sampler that its module makes is ours.

    Why a patch: the V2 runner of vLLM 0.32 names the class it makes, and has no
    hook for it. Can go once it asks a method. Samplers of other classes, such as a model's own, stay what they are.
    """
    before, v2.Sampler = v2.Sampler, GreedySampler  # type: ignore[misc]
    try:
        yield
    finally:
        v2.Sampler = before  # type: ignore[misc]
