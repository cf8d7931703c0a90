"""Temperature and Gumbel-max sampling: the noise of a request's seed must be the interpreter's to the last bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kernel_comparison import Results, compare, distinct, floats, ints
from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample

MAX_REQS = 8
VOCABS = [100, 1024, 2500]
INT64 = np.iinfo(np.int64)


def _temperatures(rng: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(rng.choice(np.array([0.0, 1.0, 0.3, 0.7, 2.0], dtype=np.float32), MAX_REQS))


def _seeds(rng: np.random.Generator) -> torch.Tensor:
    seeds = rng.integers(INT64.min, INT64.max, MAX_REQS)
    seeds[:4] = [0, 1, -1, INT64.min]
    return torch.from_numpy(seeds)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_temperature(vocab: int, dtype: torch.dtype) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        # A row stride larger than the vocabulary: padded logits are cut, not copied.
        logits = floats(rng, 6, vocab + 3).to(dtype)[:, :vocab]
        apply_temperature(logits, distinct(rng, 6, MAX_REQS), _temperatures(rng))
        return {"logits": logits}

    # The interpreter cuts float32 off to bfloat16, where torch, like a GPU, rounds.
    rtol = 0.0 if dtype == torch.float32 else 2.0**-7
    for seed in range(3):
        compare(scenario, "sample.gumbel._temperature_kernel", seed=seed, rtol=rtol)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5])
def test_temperature_of_all_rows(temperature: float) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        logits = floats(rng, 6, 300)
        apply_temperature(logits, distinct(rng, 6, MAX_REQS), torch.full((MAX_REQS,), temperature))
        return {"logits": logits}

    compare(scenario, "sample.gumbel._temperature_kernel")


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("use_fp64", [False, True])
@pytest.mark.parametrize("apply_temp", [False, True])
@pytest.mark.parametrize("is_drafting", [False, True])
def test_gumbel_sample(
    vocab: int, use_fp64: bool, apply_temp: bool, is_drafting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compares each block's best noised logit as well as the token, through what the launcher allocates for them."""

    def scenario(rng: np.random.Generator) -> Results:
        logits = floats(rng, 7, vocab, scale=3.0)
        # Only some tokens are left to some rows, as after top-k.
        logits[1, 5:] = float("-inf")
        logits[2, :-3] = float("-inf")
        # A tie goes to the lowest token.
        logits[3] = 1.0
        idx_mapping = distinct(rng, 7, MAX_REQS)
        idx_mapping[4] = -1
        blocks: list[torch.Tensor] = []
        argmax = torch.Tensor.argmax

        def spy(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
            blocks.append(tensor.clone())
            return argmax(tensor, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "argmax", spy)
            sampled = gumbel_sample(
                logits,
                idx_mapping,
                _temperatures(rng),
                _seeds(rng),
                ints(rng, 0, 1 << 20, 7, dtype=torch.int64),
                apply_temperature=apply_temp,
                is_drafting=is_drafting,
                use_fp64=use_fp64,
            )
        return {"sampled": sampled, "local_max": blocks[0]}

    for seed in range(3):
        compare(scenario, "sample.gumbel._gumbel_sample_kernel", seed=seed)


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_greedy_and_bfloat16(num_tokens: int) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        logits = floats(rng, num_tokens, 1500).to(torch.bfloat16)
        results = {}
        for temperature in (0.0, 0.8):
            results[str(temperature)] = gumbel_sample(
                logits,
                distinct(rng, num_tokens, MAX_REQS).to(torch.int32),
                torch.full((MAX_REQS,), temperature),
                _seeds(rng),
                ints(rng, 0, 99, num_tokens, dtype=torch.int64),
                apply_temperature=True,
                is_drafting=False,
            )
        return results

    compare(scenario, "sample.gumbel._gumbel_sample_kernel")


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_the_largest(vocab: int, dtype: torch.dtype) -> None:
    """What GreedySampler counts on: without noise, the kernels together are an argmax, among equal logits too."""
    rng = np.random.default_rng(vocab)
    # Five values for all tokens: the largest occurs in every block, and many times.
    logits = torch.from_numpy(rng.integers(-2, 3, (6, vocab)).astype(np.float32)).to(dtype)
    sampled = gumbel_sample(
        logits,
        distinct(rng, 6, MAX_REQS),
        torch.zeros(MAX_REQS),
        _seeds(rng),
        ints(rng, 0, 99, 6, dtype=torch.int64),
        apply_temperature=False,
        is_drafting=False,
    )
    first = (logits == logits.max(dim=-1, keepdim=True).values).int().argmax(dim=-1)
    assert torch.equal(sampled, first)
    assert torch.equal(logits.argmax(dim=-1), first)


@pytest.mark.parametrize("per_token_col", [False, True])
def test_logits_cache(per_token_col: bool) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        cache = floats(rng, MAX_REQS, 3, 130)
        idx_mapping = distinct(rng, 5, MAX_REQS)
        idx_mapping[2] = -1
        sampled = gumbel_sample(
            floats(rng, 5, 120),
            idx_mapping,
            _temperatures(rng),
            _seeds(rng),
            ints(rng, 0, 99, 5, dtype=torch.int64),
            apply_temperature=True,
            is_drafting=True,
            logits_cache=cache,
            logits_cache_col=ints(rng, 0, 3, 5) if per_token_col else torch.tensor(1),
            logits_cache_source=floats(rng, 5, 120),
        )
        return {"sampled": sampled, "cache": cache}

    compare(scenario, "sample.gumbel._gumbel_sample_kernel")
