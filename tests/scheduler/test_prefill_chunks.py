"""Prefill chunks: few prompt tokens a round while few wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_handoff.scheduler_ext.policy import StageTime
from vllm_handoff.scheduler_ext.prefill_chunks import PrefillChunks


def cost(chunk: float, waiting: int, stages: int, weight_tokens: float) -> float:
    return (stages - 1) * chunk + waiting / chunk * weight_tokens


@given(st.integers(2, 16), st.integers(1, 16384), st.integers(1, 10**6), st.floats(64, 1024))
def test_no_other_size_within_the_bounds_is_better(stages: int, most: int, waiting: int, weights: float) -> None:
    chunks = PrefillChunks(stages, most, weights)
    size = chunks.size(waiting)
    assert chunks.least <= size <= most
    least = cost(size, waiting, stages, chunks.weight_tokens)
    for other in {chunks.least, most, max(chunks.least, size - 64), min(most, size + 64)}:
        # Sizes are whole numbers, hence the tolerance.
        assert least <= 1.02 * cost(other, waiting, stages, chunks.weight_tokens)


def test_the_budget_bounds_the_size_and_one_stage_has_no_other_bound() -> None:
    assert PrefillChunks(2, 8192).size(10**7) == 8192
    assert PrefillChunks(2, 300).size(10**7) == 300
    assert PrefillChunks(1, 8192).size(10) == 8192
    for stages in (2, 4):
        chunks = PrefillChunks(stages, 4096, 200)
        assert chunks.size(chunks.enough) == 4096


def test_the_size_is_kept_while_a_queue_drains_and_forgotten_with_its_end() -> None:
    chunks = PrefillChunks(2, 8192)
    first = chunks.size(64 * 512)
    assert chunks.least < first < 8192
    assert chunks.size(32 * 512) == chunks.size(5 * 512) == first
    assert chunks.size(4 * 512) < first
    assert chunks.size(0) == chunks.least == 1024
    assert chunks.size(64 * 512) == first
    assert chunks.size(256 * 512) > first, "a longer queue is known at once"


def test_more_stages_take_smaller_chunks() -> None:
    sizes = [PrefillChunks(stages, 8192).size(50_000) for stages in (2, 4, 8)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3
    assert [PrefillChunks(stages, 8192).size(1) for stages in (2, 4, 8)] == [1024, 341, 256]


def test_a_stage_time_gives_the_price_of_a_round_within_bounds() -> None:
    assert StageTime(3e-3, 12e-6).weight_rows == 250
    assert StageTime(3e-3, 0).weight_rows is None
    assert PrefillChunks(2, 8192, 250).weight_tokens == 250
    assert PrefillChunks(2, 8192, 1e9).weight_tokens == 1024
    assert PrefillChunks(2, 8192, 1).weight_tokens == 64
    assert PrefillChunks(2, 8192, None).weight_tokens == 256
