"""The n-gram proposer: which match it takes, and what it proposes where there is none."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_comparison import CPU, Results, compare, distinct, ints
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator

MAX_REQS = 8
SCAN = "spec_decode.ngram.speculator._ngram_scan_kernel"
FINALIZE = "spec_decode.ngram.speculator._ngram_finalize_kernel"
BOTH = (SCAN, FINALIZE)


def _speculator(
    all_token_ids: torch.Tensor, total_len: torch.Tensor, min_n: int, max_n: int, num_drafts: int
) -> NgramGPUSpeculator:
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            prompt_lookup_min=min_n, prompt_lookup_max=max_n, num_speculative_tokens=num_drafts
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_REQS),
        model_config=SimpleNamespace(max_model_len=all_token_ids.shape[1]),
    )
    states = SimpleNamespace(all_token_ids=SimpleNamespace(gpu=all_token_ids), total_len=SimpleNamespace(gpu=total_len))
    speculator = NgramGPUSpeculator(config, CPU, states)
    # As an earlier round left them.
    speculator.scratch.fill_(5)
    speculator.drafts.fill_(-7)
    return speculator


def _propose(
    speculator: NgramGPUSpeculator, idx_mapping: torch.Tensor, num_sampled: torch.Tensor, last_sampled: torch.Tensor
) -> Results:
    batch = SimpleNamespace(num_reqs=idx_mapping.shape[0], idx_mapping=idx_mapping)
    unused = [None] * 4
    drafts = speculator.propose(batch, *unused, num_sampled, None, last_sampled, None, None, None)
    num_reqs = idx_mapping.shape[0]
    return {
        "drafts": drafts.clone(),
        "rest": speculator.drafts[num_reqs:].clone(),
        "best": speculator.scratch[:num_reqs].amax(dim=1),
    }


# Together, and each next to vLLM's own other one: what the scan hands over must be what both mean by it. The lengths
# are cut into blocks of 16, 64, 128 and 256 tokens.
@pytest.mark.parametrize(
    ("kernels", "max_len"), [(BOTH, 10), (BOTH, 100), (BOTH, 1100), ((SCAN,), 300), ((FINALIZE,), 300)], ids=str
)
@pytest.mark.parametrize(("min_n", "max_n", "num_drafts"), [(1, 1, 1), (1, 3, 4), (2, 5, 3), (3, 3, 2)])
def test_random_tokens(kernels: tuple[str, ...], max_len: int, min_n: int, max_n: int, num_drafts: int) -> None:
    """Of two to thirty different tokens, so that there are matches of all lengths, and none at all."""

    def scenario(rng: np.random.Generator) -> Results:
        num_reqs = 6
        all_token_ids = ints(rng, 0, int(rng.choice([2, 4, 30])), MAX_REQS, max_len)
        total_len = ints(rng, 1, max_len + 1, MAX_REQS)
        # Shorter than the n-grams, and full to the last column.
        total_len[:3] = torch.tensor([1, 2, max_len], dtype=torch.int32)
        speculator = _speculator(all_token_ids, total_len, min_n, max_n, num_drafts)
        return _propose(
            speculator,
            distinct(rng, num_reqs, MAX_REQS),
            ints(rng, 0, num_drafts + 2, num_reqs),
            ints(rng, 0, 30, MAX_REQS, 1, dtype=torch.int64),
        )

    for seed in range(2 if max_len < 300 else 1):
        compare(scenario, *kernels, seed=seed)


# Sequence, (min_n, max_n), expected drafts; the last sampled token is 99.
CHOICES = {
    "longest run": ([1, 2, 3, 7, 8, 3, 9, 1, 2, 3], (1, 3), [7, 8, 3]),
    "last occurrence": ([1, 2, 5, 5, 1, 2, 6, 6, 6, 1, 2], (2, 2), [6, 6, 6]),
    "runs into its own end": ([4, 4, 4, 4], (2, 3), [4, 99, 99]),
    "match at the end": ([1, 2, 8, 2], (1, 2), [8, 2, 99]),
    "too short a match": ([1, 2, 8, 2], (2, 3), [99, 99, 99]),
    "no match": ([1, 2, 3, 4], (1, 3), [99, 99, 99]),
    "shorter than the n-gram": ([3], (2, 4), [99, 99, 99]),
    "no earlier token": ([3], (1, 4), [99, 99, 99]),
    "at the start": ([6, 7, 1, 2, 6, 7], (2, 2), [1, 2, 6]),
}


@pytest.mark.parametrize(("tokens", "n", "expected"), CHOICES.values(), ids=CHOICES)
def test_choice(tokens: list[int], n: tuple[int, int], expected: list[int]) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        # What lies behind a sequence is left from an earlier request.
        all_token_ids = torch.full((MAX_REQS, 40), 2, dtype=torch.int32)
        all_token_ids[3, : len(tokens)] = torch.tensor(tokens)
        total_len = torch.full((MAX_REQS,), len(tokens), dtype=torch.int32)
        results = _propose(
            _speculator(all_token_ids, total_len, *n, 3),
            torch.tensor([3]),
            torch.tensor([1], dtype=torch.int32),
            torch.full((MAX_REQS, 1), 99),
        )
        assert results["drafts"].tolist() == [expected]
        return results

    compare(scenario, *BOTH)
