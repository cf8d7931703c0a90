"""Verification of draft tokens: the same seeds must accept, reject and draw the same tokens as the interpreter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_comparison import Results, compare, distinct, floats, ints, prefix_sums
from vllm.triton_utils import tl, triton
from vllm.v1.worker.gpu.sample.gumbel import tl_rand32
from vllm.v1.worker.gpu.spec_decode import rejection_sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

from vllm_handoff.worker.cpu_kernels.philox import uniform

MAX_REQS, STEPS = 10, 4
UTILS = "spec_decode.rejection_sampler_utils"
STANDARD = [
    f"{UTILS}._compute_local_logits_stats_kernel",
    f"{UTILS}._rejection_kernel",
    f"{UTILS}._resample_kernel",
    f"{UTILS}._insert_resampled_kernel",
]
CUMULATIVE = f"{UTILS}._compute_cumulative_log_p_kernel"
RESIDUAL = f"{UTILS}._compute_local_residual_mass_kernel"
INT64 = np.iinfo(np.int64)

# Drafts of each row: none at all, some rows without, all rows full.
SOME = [2, 0, 4, 1, 3, 4, 1]
batches = pytest.mark.parametrize("drafts", [[0, 0, 0], SOME, [STEPS] * 5], ids=str)
# Two blocks of logits statistics and nine of the resampler's, the last of each cut short.
LARGE_VOCAB = 8192 + 300


def _verify(
    rng: np.random.Generator,
    drafts: list[int],
    vocab: int,
    *,
    with_draft_logits: bool,
    temperatures: tuple[float, ...] = (0.0, 0.0, 1.0, 0.7, 1.6),
    draft_vocab: int | None = None,
    near_drafts: bool = True,
    invalid: float = 0.1,
    agreement: float = 0.5,
    dtype: torch.dtype = torch.float32,
    rates: torch.Tensor | None = None,
    use_fp64: bool = False,
    use_block_verification: bool = False,
) -> Results:
    """A batch of drafts which the target's logits favour in about the share `agreement` of the rows."""
    draft_vocab = vocab if draft_vocab is None else draft_vocab
    num_logits = [count + 1 for count in drafts]
    total, num_reqs = sum(num_logits), len(drafts)
    idx_mapping = distinct(rng, num_reqs, MAX_REQS)
    reqs = np.repeat(np.arange(num_reqs), num_logits)
    local_pos = np.concatenate([np.arange(count) for count in num_logits]).astype(np.int32)
    expanded_idx = idx_mapping[torch.from_numpy(reqs)]
    temperature = torch.from_numpy(rng.choice(np.array(temperatures, dtype=np.float32), MAX_REQS))
    # Whole and half numbers, so that best tokens have ties, which go to the lowest token.
    target = (floats(rng, total, vocab) * 4.0).round() / 2.0
    target += torch.from_numpy(rng.choice(np.array([0.0, 1e-3], dtype=np.float32), (total, 1))) * floats(rng, 1, vocab)
    target[:, min(vocab, draft_vocab) // 2 :] -= 1.0
    draft_sampled = ints(rng, 0, min(vocab, draft_vocab), total)
    follows = torch.from_numpy(np.flatnonzero(local_pos > 0))
    favoured = follows[torch.from_numpy(rng.random(follows.shape[0]) < agreement)]
    target[favoured - 1, draft_sampled[favoured].long()] += 20.0
    # Only some tokens are left, as after top-k; in one row none of the first block.
    target[0, 5:] = float("-inf")
    if total > 2 and vocab > 8192:
        target[2, :8192] = float("-inf")
    draft_sampled[follows[torch.from_numpy(rng.random(follows.shape[0]) < invalid)]] = -1
    draft_logits = None
    if with_draft_logits:
        draft_logits = floats(rng, MAX_REQS, STEPS, draft_vocab, scale=2.0).to(dtype)
        # Close to the target's own in some rows, so that little of it is left.
        for row in range(0, total, 2):
            if near_drafts and local_pos[row] < STEPS:
                width = min(vocab, draft_vocab)
                near = target[row, :width] * max(float(temperature[expanded_idx[row]]), 0.1)
                draft_logits[expanded_idx[row], local_pos[row], :width] = near.clamp(min=-30.0).to(dtype)
    seeds = rng.integers(INT64.min, INT64.max, MAX_REQS)
    seeds[:4] = [0, 1, -1, INT64.min]
    sampled, num_sampled = rejection_sample(
        target.to(dtype),
        draft_logits,
        draft_sampled,
        prefix_sums(num_logits),
        ints(rng, 0, 1 << 40, total, dtype=torch.int64),
        idx_mapping,
        expanded_idx,
        torch.from_numpy(local_pos),
        temperature,
        torch.from_numpy(seeds),
        STEPS,
        rates,
        use_fp64=use_fp64,
        use_block_verification=use_block_verification,
    )
    # What is behind a row's last token is never written.
    return {"sampled": sampled.where(torch.arange(STEPS + 1) < num_sampled[:, None], -1), "num_sampled": num_sampled}


@batches
@pytest.mark.parametrize("vocab", [40, LARGE_VOCAB])
@pytest.mark.parametrize("with_draft_logits", [False, True])
@pytest.mark.parametrize("use_block_verification", [False, True])
def test_mixed_batch(drafts: list[int], vocab: int, with_draft_logits: bool, use_block_verification: bool) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        return _verify(
            rng,
            drafts,
            vocab,
            with_draft_logits=with_draft_logits,
            use_block_verification=use_block_verification,
            use_fp64=bool(rng.integers(2)),
        )

    kernels = list(STANDARD)
    if use_block_verification:
        kernels += [CUMULATIVE, *([RESIDUAL] if with_draft_logits else [])]
    for seed in range(3 if vocab == 40 else 1):
        compare(scenario, *kernels, seed=seed)


@pytest.mark.parametrize("kernel", [*STANDARD, CUMULATIVE, RESIDUAL])
def test_each_kernel_among_vllms(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kernel hands over is what vLLM's next one expects, and the numbers are vLLM's own up to rounding."""
    use_block_verification = kernel in (CUMULATIVE, RESIDUAL)
    names = ["argmax", "max", "sumexp", "draft max", "draft sumexp"]
    names += ["cumulative", "residual"] if use_block_verification else []
    names += ["sampled", "num_sampled", "target lse", "draft lse", "resampled argmax", "resampled max"]
    # Of a normaliser that nothing reads the kernel writes more, and of tokens the native version.
    compared = [name for name in names if "lse" not in name and name != "sampled"]

    def scenario(rng: np.random.Generator) -> Results:
        allocated: list[torch.Tensor] = []
        new_empty = torch.Tensor.new_empty

        def spy(*args: object, **kwargs: object) -> torch.Tensor:
            tensor = new_empty(*args, **kwargs).zero_()
            # The interpreter makes empty ones for its own use.
            if tensor.numel():
                allocated.append(tensor)
            return tensor

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "new_empty", spy)
            results = _verify(
                rng,
                SOME,
                LARGE_VOCAB,
                with_draft_logits=True,
                near_drafts=False,
                invalid=0.4,
                use_block_verification=use_block_verification,
            )
        written = dict(zip(names, allocated, strict=True))
        if use_block_verification:
            # The kernel writes one too for a request with fewer drafts than steps, behind its last.
            written["residual"][np.cumsum(SOME) + np.arange(len(SOME))] = 0.0
        return results | {name: written[name] for name in compared}

    compare(scenario, kernel, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("use_block_verification", [False, True])
@pytest.mark.parametrize(("agreement", "invalid"), [(1.0, 0.0), (0.0, 0.0), (1.0, 1.0)])
@pytest.mark.parametrize("temperatures", [(0.0,), (1.0,)])
def test_all_or_nothing(
    agreement: float, invalid: float, temperatures: tuple[float, ...], use_block_verification: bool
) -> None:
    """All drafts accepted, the first rejected, and all invalid, in batches that are all greedy or all random."""
    accepts = agreement == 1.0 and invalid == 0.0

    def scenario(rng: np.random.Generator) -> Results:
        results = _verify(
            rng,
            [STEPS] * 4,
            1100,
            with_draft_logits=False,
            temperatures=temperatures,
            invalid=invalid,
            agreement=agreement,
            use_block_verification=use_block_verification,
        )
        # The first row of logits has only five tokens left.
        assert (results["num_sampled"][1:] == (STEPS + 1 if accepts else 1)).all()
        return results

    kernels = [*STANDARD, *([CUMULATIVE] if use_block_verification else [])]
    compare(scenario, *kernels)


@pytest.mark.parametrize("use_block_verification", [False, True])
@pytest.mark.parametrize(("vocab", "draft_vocab"), [(1100, 1060), (1060, 1100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vocabularies_of_two_sizes(
    vocab: int, draft_vocab: int, dtype: torch.dtype, use_block_verification: bool
) -> None:
    """The larger one is padded, and only the tokens that both have are drawn."""

    def scenario(rng: np.random.Generator) -> Results:
        return _verify(
            rng,
            [3, 1, 0, 4, 2],
            vocab,
            with_draft_logits=True,
            draft_vocab=draft_vocab,
            dtype=dtype,
            use_block_verification=use_block_verification,
        )

    for seed in range(2):
        compare(scenario, *STANDARD, seed=seed)


@pytest.mark.parametrize("with_draft_logits", [False, True])
def test_synthetic_acceptance(with_draft_logits: bool) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        rates = torch.tensor([0.9, 0.8, 0.5, 0.3])
        return _verify(rng, SOME, 1100, with_draft_logits=with_draft_logits, rates=rates)

    for seed in range(3):
        compare(scenario, *STANDARD, seed=seed)


def test_blocks_of_nans_lose() -> None:
    def scenario(rng: np.random.Generator) -> Results:
        target = floats(rng, 3, 8192 + 1024)
        target[:, 8192:] = float("nan")
        sampled, num_sampled = rejection_sample(
            target,
            None,
            torch.tensor([0, int(target[0, :8192].argmax()), 3], dtype=torch.int32),
            prefix_sums([3]),
            torch.arange(3),
            torch.tensor([1]),
            torch.tensor([1, 1, 1]),
            torch.arange(3, dtype=torch.int32),
            torch.zeros(2),
            torch.zeros(2, dtype=torch.int64),
            2,
        )
        assert num_sampled.tolist() == [2]
        return {"sampled": sampled[:, :2]}

    compare(scenario, *STANDARD)


@triton.jit
def _uniform_kernel(out_ptr, seeds_ptr, positions_ptr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    tl.store(out_ptr + row, tl_rand32(tl.load(seeds_ptr + row), tl.load(positions_ptr + row), includes_zero=False))


def test_uniform() -> None:
    """The draws that accept and reject, to the last bit."""
    rng = np.random.default_rng(0)
    seeds, positions = rng.integers(INT64.min, INT64.max, 60), rng.integers(0, 1 << 40, 60)
    seeds[:4], positions[:2] = [0, 1, -1, INT64.min], 0
    expected = torch.zeros(60)
    _uniform_kernel[(60,)](expected, torch.from_numpy(seeds), torch.from_numpy(positions))
    np.testing.assert_array_equal(uniform(seeds, positions), expected.numpy())


@pytest.mark.parametrize("num_sampled", [[1], [0, 3, 1, 2, 0]], ids=str)
def test_flatten_sampled(num_sampled: list[int]) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        num_reqs = len(num_sampled)
        flat = torch.zeros(num_reqs * 4, dtype=torch.int64)
        sampled = ints(rng, 0, 99, num_reqs, 4, dtype=torch.int64)
        rejection_sampler._flatten_sampled_kernel[(num_reqs,)](
            flat,
            sampled,
            sampled.stride(0),
            torch.tensor(num_sampled, dtype=torch.int32),
            prefix_sums([4] * num_reqs),
            num_warps=1,
        )
        return {"flat": flat}

    compare(scenario, "spec_decode.rejection_sampler._flatten_sampled_kernel")


@batches
def test_gather_draft_sampled(drafts: list[int]) -> None:
    """Rows in their prompt, past it, and on its border; more rows of logits than a block holds."""
    num_logits = [count + 1 for count in drafts] * 90

    def scenario(rng: np.random.Generator) -> Results:
        total = sum(num_logits)
        draft_sampled, pos = rejection_sampler.gather_draft_sampled(
            ints(rng, 0, 99, 3 * total),
            ints(rng, 0, 12, 3 * total, dtype=torch.int64),
            ints(rng, 0, 3 * total, total, dtype=torch.int64),
            ints(rng, 0, MAX_REQS, total, dtype=torch.int64),
            torch.from_numpy(np.concatenate([np.arange(count) for count in num_logits]).astype(np.int32)),
            ints(rng, 0, 12, MAX_REQS),
        )
        return {"draft_sampled": draft_sampled, "pos": pos}

    compare(scenario, "spec_decode.rejection_sampler._gather_draft_sampled_kernel")
