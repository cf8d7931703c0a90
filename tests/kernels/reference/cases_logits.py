"""The kernels that change logits before sampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_comparison import Results, compare, distinct, floats, ints, prefix_sums
from vllm.v1.worker.gpu.sample.bad_words import apply_bad_words
from vllm.v1.worker.gpu.sample.logit_bias import apply_logit_bias
from vllm.v1.worker.gpu.sample.min_p import apply_min_p
from vllm.v1.worker.gpu.sample.penalties import apply_penalties, bincount
from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

MAX_REQS = 8
VOCABS = [70, 1030]


def _rows(rng: np.random.Generator, with_drafts: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(expanded_idx_mapping, expanded_local_pos) of six rows."""
    lengths = [3, 1, 2] if with_drafts else [1] * 6
    reqs = distinct(rng, len(lengths), MAX_REQS)
    expanded = torch.repeat_interleave(reqs, torch.tensor(lengths))
    local_pos = torch.cat([torch.arange(length, dtype=torch.int32) for length in lengths])
    return expanded, local_pos


def _choice(rng: np.random.Generator, *values: float) -> torch.Tensor:
    return torch.from_numpy(rng.choice(np.array(values, dtype=np.float32), MAX_REQS))


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("with_drafts", [False, True])
def test_penalties(vocab: int, with_drafts: bool) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        logits = floats(rng, 6, vocab)
        logits[0, :4] = torch.tensor([0.0, -0.0, float("inf"), float("-inf")])
        expanded, local_pos = _rows(rng, with_drafts)
        in_prompt = np.zeros((MAX_REQS, -(-vocab // 32) * 32), dtype=np.uint8)
        in_prompt[:, :vocab] = rng.random((MAX_REQS, vocab)) < 0.3
        apply_penalties(
            logits,
            expanded,
            ints(rng, 0, vocab, 6),
            local_pos,
            _choice(rng, 1.0, 1.3, 0.8),
            _choice(rng, 0.0, 0.5, -0.7),
            _choice(rng, 0.0, 0.4, -0.2),
            torch.from_numpy(np.packbits(in_prompt, axis=1, bitorder="little").view(np.int32)),
            torch.clamp(ints(rng, -6, 4, MAX_REQS, vocab), min=0),
        )
        return {"logits": logits}

    for seed in range(4):
        compare(scenario, "sample.penalties._penalties_kernel", seed=seed)


@pytest.mark.parametrize("max_len", [60, 2200])
def test_bincount(max_len: int) -> None:
    vocab = 300

    def scenario(rng: np.random.Generator) -> Results:
        prompt_len = ints(rng, 1, max_len // 2, MAX_REQS)
        prefill_len = prompt_len + ints(rng, 0, max_len // 2, MAX_REQS) * ints(rng, 0, 2, MAX_REQS)
        mask, counts = ints(rng, 0, 99, MAX_REQS, 10), ints(rng, 0, 99, MAX_REQS, vocab)
        all_token_ids = ints(rng, 0, vocab, MAX_REQS, max_len)
        reqs = distinct(rng, 4, MAX_REQS)
        bincount(reqs, all_token_ids, prompt_len, prefill_len, mask, counts, int(prefill_len.max()))
        return {"mask": mask, "counts": counts}

    compare(scenario, "sample.penalties._bincount_kernel")


@pytest.mark.parametrize("vocab", VOCABS)
def test_min_p(vocab: int) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        logits = floats(rng, 6, vocab, scale=3.0)
        logits[1, 3:] = float("-inf")
        apply_min_p(logits, distinct(rng, 6, MAX_REQS), _choice(rng, 0.0, 0.1, 0.9, 1.0))
        return {"logits": logits}

    for seed in range(3):
        compare(scenario, "sample.min_p._min_p_kernel", seed=seed)


@pytest.mark.parametrize("check_all_masked", [False, True])
def test_logit_bias(check_all_masked: bool) -> None:
    vocab, capacity = 90, 16

    def scenario(rng: np.random.Generator) -> Results:
        def token_ids() -> torch.Tensor:
            return torch.stack([distinct(rng, capacity, vocab).to(torch.int32) for _ in range(MAX_REQS)])

        def counts() -> torch.Tensor:
            return ints(rng, 0, capacity + 1, MAX_REQS) * ints(rng, 0, 2, MAX_REQS)

        logits, expanded = floats(rng, 6, vocab), distinct(rng, 6, MAX_REQS)
        allowed, num_allowed, stop, num_stop = token_ids(), counts(), token_ids(), counts()
        # Here the ban on stopping leaves nothing: only stop tokens are allowed.
        for row in (0, 1):
            allowed[expanded[row]] = stop[expanded[row]]
            num_allowed[expanded[row]] = 3
            num_stop[expanded[row]] = 5
        logits[0, stop[expanded[0], 0].long()] = float("inf")
        apply_logit_bias(
            logits,
            expanded,
            ints(rng, 5, 9, 6, dtype=torch.int64),
            num_allowed,
            allowed,
            counts(),
            token_ids(),
            floats(rng, MAX_REQS, capacity),
            ints(rng, 8, 12, MAX_REQS),
            num_stop,
            ints(rng, 0, 2, MAX_REQS),
            stop,
            check_all_masked,
        )
        return {"logits": logits}

    for seed in range(8):
        compare(scenario, "sample.logit_bias._bias_kernel", seed=seed)


@pytest.mark.parametrize("with_drafts", [False, True])
def test_bad_words(with_drafts: bool) -> None:
    # Few tokens, so that prefixes match by chance.
    vocab, max_len, max_words = 3, 30, 4

    def scenario(rng: np.random.Generator) -> Results:
        logits = floats(rng, 6, vocab)
        expanded, local_pos = _rows(rng, with_drafts)
        lengths = rng.integers(1, 4, (MAX_REQS, max_words))
        offsets = torch.from_numpy(np.concatenate((np.zeros((MAX_REQS, 1)), lengths.cumsum(1)), 1).astype(np.int32))
        prompt_len = ints(rng, 3, 9, MAX_REQS)
        apply_bad_words(
            logits,
            expanded,
            ints(rng, 0, vocab, MAX_REQS, 3 * max_words),
            offsets,
            ints(rng, 0, max_words + 1, MAX_REQS),
            ints(rng, 0, vocab, MAX_REQS, max_len),
            prompt_len,
            prompt_len + ints(rng, 0, 6, MAX_REQS),
            ints(rng, 0, vocab, 6),
            local_pos,
            max_words,
        )
        return {"logits": logits}

    for seed in range(10):
        compare(scenario, "sample.bad_words._bad_words_kernel", seed=seed)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grammar_bitmask(vocab: int, dtype: torch.dtype) -> None:
    class Batch:
        """What the launcher reads of an InputBatch."""

        req_ids = tuple("abcd")
        num_draft_tokens_per_req = np.array([0, 2, 1, 0])
        # Row b was scheduled with two drafts and has logits for one of them only.
        cu_num_logits = prefix_sums([1, 2, 2, 1])
        cu_num_logits_np = cu_num_logits.numpy()

    def scenario(rng: np.random.Generator) -> Results:
        worker = StructuredOutputsWorker(8, vocab, torch.device("cpu"), mask_stride=3, num_bonus_tokens=1)
        logits = floats(rng, 6, vocab).to(dtype)
        bitmask = rng.integers(-(2**31), 2**31, (6, -(-vocab // 32))).astype(np.int32)
        bitmask[4], bitmask[5] = -1, 0
        worker.apply_grammar_bitmask(logits, Batch, ["b", "c", "d"], bitmask)
        return {"logits": logits}

    compare(scenario, "structured_outputs._apply_grammar_bitmask_kernel")


def test_num_nans() -> None:
    """Against plain Python: the interpreter has no libdevice, which the kernel asks for NaNs."""
    from vllm_handoff.worker.cpu_kernels.sampler_output import num_nans

    rng = np.random.default_rng(0)
    logits = floats(rng, 5, 200)
    logits[ints(rng, 0, 2, 5, 200).bool()] = float("nan")
    logits[2] = 0.0
    counts = torch.full((5,), 9, dtype=torch.int32)
    num_nans(logits, 200, counts, 200, 8192)
    assert counts.tolist() == [sum(value != value for value in row) for row in logits.tolist()]
