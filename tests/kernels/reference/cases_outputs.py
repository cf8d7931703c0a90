"""The kernels that report on sampling, and those that replace sampled tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_comparison import CPU, Results, compare, distinct, floats, ints, prefix_sums
from vllm.v1.worker.gpu.sample.logprob import LogprobTokenIdsState, compute_token_logprobs, compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplingMaskTensors
from vllm.v1.worker.gpu.sample.prompt_logprob import get_prompt_logprobs_token_ids
from vllm.v1.worker.gpu.sample.thinking_budget import apply_thinking_budget
from vllm.v1.worker.gpu.sample.trace_replay import apply_trace_tokens

MAX_REQS = 8


@pytest.mark.parametrize("vocab", [90, 2100])
@pytest.mark.parametrize("num_ids", [1, 5, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_logprobs(vocab: int, num_ids: int, dtype: torch.dtype) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        logits = floats(rng, 4, vocab, scale=4.0).to(dtype)
        logits[1, 7:] = float("-inf")
        return {"logprobs": compute_token_logprobs(logits, ints(rng, 0, vocab, 4, num_ids))}

    # The sums are over the same terms in another order.
    compare(scenario, "sample.logprob._topk_log_softmax_kernel", rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("num_logprobs", [0, 3])
@pytest.mark.parametrize("own_ids", [0, 5])
def test_topk_scores(num_logprobs: int, own_ids: int) -> None:
    vocab, num_rows = 400, 6

    def scenario(rng: np.random.Generator) -> Results:
        state = LogprobTokenIdsState(MAX_REQS, CPU)
        for req in range(0, MAX_REQS, 2):
            if own_ids:
                state.num_token_ids.np[req] = own_ids - req // 2
                state.token_ids.stage_write(req, 0, rng.integers(0, vocab, own_ids - req // 2).tolist())
        state.apply_staged_writes()
        # Whole numbers, so that ranks have ties.
        logits = ints(rng, 0, 50, num_rows, vocab).float() + torch.arange(vocab) * 1e-3
        logits[0] = 1.0
        tensors = compute_topk_scores(
            logits,
            num_logprobs,
            ints(rng, 0, vocab, num_rows, dtype=torch.int64),
            logprob_token_ids_state=state,
            expanded_idx_mapping=distinct(rng, num_rows, MAX_REQS),
            max_per_req_token_ids=own_ids,
        )
        return {
            "token_ids": tensors.logprob_token_ids,
            "logprobs": tensors.logprobs,
            "ranks": tensors.selected_token_ranks,
        }

    kernels = ["sample.logprob._topk_log_softmax_kernel", "sample.logprob._ranks_kernel"]
    if own_ids:
        kernels += ["sample.logprob._fill_logprob_token_ids_kernel", "buffer_utils._apply_write_kernel"]
    compare(scenario, *kernels, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("lengths", [[4], [5, 1, 9]], ids=str)
def test_prompt_logprobs_token_ids(lengths: list[int]) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        token_ids = get_prompt_logprobs_token_ids(
            sum(lengths),
            prefix_sums(lengths),
            distinct(rng, len(lengths), MAX_REQS),
            ints(rng, 0, 10, MAX_REQS),
            ints(rng, 0, 99, MAX_REQS, 40),
        )
        return {"token_ids": token_ids}

    compare(scenario, "sample.prompt_logprob._prompt_logprobs_token_ids_kernel")


def test_trace_replay() -> None:
    def scenario(rng: np.random.Generator) -> Results:
        sampled, idx_mapping = ints(rng, 0, 99, 7, dtype=torch.int64), distinct(rng, 7, MAX_REQS)
        idx_mapping[3] = -1
        prompt_len = ints(rng, 2, 9, MAX_REQS)
        apply_trace_tokens(
            sampled,
            idx_mapping,
            ints(rng, 0, 99, MAX_REQS, 12),
            ints(rng, 0, 8, MAX_REQS),
            prompt_len + ints(rng, -1, 8, MAX_REQS),
            prompt_len,
        )
        return {"sampled": sampled}

    for seed in range(4):
        compare(scenario, "sample.trace_replay._trace_replay_kernel", seed=seed)


@pytest.mark.parametrize("rows_per_request", [1, 3])
@pytest.mark.parametrize("vocab", [75, 8200])
def test_sampling_mask(rows_per_request: int, vocab: int) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        num_reqs = 4
        logits = floats(rng, num_reqs * rows_per_request, vocab)
        logits[ints(rng, 0, 2, *logits.shape).bool()] = float("-inf")
        logits[0] = float("-inf")
        num_sampled = torch.tensor([1, 0, rows_per_request, 1], dtype=torch.int32)
        mask = SamplingMaskTensors.from_logits(
            logits, prefix_sums([rows_per_request] * num_reqs), num_sampled, 30, rows_per_request
        )
        # What lies behind the count, or in a row that sampled nothing, is never written.
        listed = torch.arange(30) < mask.counts[:, None]
        slots = torch.arange(rows_per_request) < num_sampled[:, None]
        return {
            "counts": mask.counts,
            "token_ids": mask.token_ids.where(listed, -1),
            "packed": mask.packed_mask.where(slots.reshape(-1, 1), 0),
        }

    compare(scenario, "sample.output._compact_sampling_mask_kernel")


@pytest.mark.parametrize("with_drafts", [False, True])
@pytest.mark.parametrize("marker_lens", [(1, 1, 1), (2, 1, 3), (1, 2, 2)], ids=str)
def test_thinking_budget(with_drafts: bool, marker_lens: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rounds each, so that both the first scan and the later ones are seen."""
    vocab, max_len = 4, 60
    # Small steps of the first scan, so that it takes several.
    monkeypatch.setattr("vllm.v1.worker.gpu.sample.thinking_budget._COLD_SCAN_BLOCK", 8)

    def scenario(rng: np.random.Generator) -> Results:
        lengths = [3, 1, 2] if with_drafts else [1] * 6
        reqs = distinct(rng, len(lengths), MAX_REQS)
        start, natural_end, end = (ints(rng, 0, vocab, length) for length in marker_lens)
        budget = ints(rng, -1, 4, MAX_REQS)
        all_token_ids, total_len = ints(rng, 0, vocab, MAX_REQS, max_len), ints(rng, 1, 40, MAX_REQS)
        cached_start, cached_end = (torch.full((MAX_REQS,), -1, dtype=torch.int32) for _ in range(2))
        scan_pos = torch.zeros(MAX_REQS, dtype=torch.int32)
        results: Results = {}
        for step in range(4):
            logits = floats(rng, 6, vocab)
            apply_thinking_budget(
                logits,
                reqs,
                torch.repeat_interleave(reqs, torch.tensor(lengths)),
                budget,
                all_token_ids,
                total_len,
                ints(rng, 0, vocab, 6),
                torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths]),
                cached_start,
                cached_end,
                scan_pos,
                start,
                natural_end,
                end,
            )
            results |= {
                f"logits {step}": logits,
                f"start {step}": cached_start.clone(),
                f"end {step}": cached_end.clone(),
                f"scan {step}": scan_pos.clone(),
            }
            total_len += ints(rng, 0, 4, MAX_REQS)
        return results

    for seed in range(4):
        compare(
            scenario,
            "sample.thinking_budget._update_committed_marker_cache_kernel",
            "sample.thinking_budget._thinking_budget_kernel",
            seed=seed,
        )
