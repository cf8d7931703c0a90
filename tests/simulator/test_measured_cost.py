"""Stage times fitted to recorded rounds, and the bounds worked out from them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from vllm_handoff.benchmarks.nearness import add_bounds
from vllm_handoff.scheduler_ext.stage_cost import RoundWork
from vllm_handoff.simulator.measured_cost import MeasuredCost, points_of

TRUE = MeasuredCost(2e-3, 3e-4, 4e-6, 1.6e-8, 1.2e-5, 1e-10)


def recorded(work: RoundWork, seconds: float, waits: float = 0.0) -> list[Any]:
    """A round as a recording has it: waiting for tokens, then computing, with a wait for hidden states in between."""
    begin = 100.0
    handoff = begin + waits
    hop_wait = handoff + seconds / 4
    hop = hop_wait + waits
    end = hop + 3 * seconds / 4
    tokens = int(work.rows + work.prompt_tokens)
    marks = [begin, handoff, hop_wait, hop, end, end]
    return [
        7,
        tokens,
        int(work.samples),
        marks,
        [0.0, 0.0],
        [int(work.rows), int(work.context), int(work.prompt_context)],
    ]


def rounds(cost: MeasuredCost = TRUE) -> list[list[Any]]:
    rng = random.Random(0)
    works = [RoundWork.decode(rows, 100 + 40 * step) for rows in (1, 8, 32, 128) for step in range(20)]
    works += [RoundWork(rows, 4096, rows, rows * 200, 4096 * 2048) for rows in (0, 16, 64)]
    works += [RoundWork(0, tokens, 0, 0, tokens * tokens / 2) for tokens in (512, 1024, 8192)]
    found = []
    for work in works:
        # A late host makes most rounds look longer than their work is.
        found += [recorded(work, cost.seconds(work) * late, waits=rng.random()) for late in (1, 1, 1.2, 1.5, 3)]
    return found


def test_the_times_behind_a_recording_are_found_whatever_the_waits() -> None:
    fitted = MeasuredCost.fit(points_of(rounds()))
    for work in (RoundWork.decode(64, 500), RoundWork(16, 4096, 16, 3200, 4096 * 2048), RoundWork.decode(2, 100)):
        assert fitted.seconds(work) == pytest.approx(TRUE.seconds(work), rel=0.03)
    assert fitted.per_prompt_token == pytest.approx(TRUE.per_prompt_token, rel=0.05)


def test_no_coefficient_is_below_zero() -> None:
    points = [(RoundWork.decode(rows, 0), 1.0 - rows / 100) for rows in (1, 10, 20, 40)]
    fitted = MeasuredCost.fit(points)
    assert min(vars(fitted).values()) >= 0
    with pytest.raises(ValueError, match="no rounds"):
        MeasuredCost.fit([])


def test_each_recorded_load_gets_its_bound() -> None:
    rows: list[dict[str, Any]] = [{"load": "64x512+128"}, {"load": "1x128+128"}, {"load": "online 20/s x 200"}]
    stage = rounds()
    costs = add_bounds(rows, {"64x512+128": [stage, stage], "1x128+128": [stage, stage]}, stages=2)
    assert len(costs) == 2
    one = 127 * 2 * TRUE.seconds(RoundWork.decode(1, 192)) + 128 * TRUE.per_prompt_token
    assert rows[1]["bound"] == pytest.approx(one, rel=0.03)
    assert rows[0]["bound"] > 64 * 512 * TRUE.per_prompt_token
    assert "bound" not in rows[2]
    assert add_bounds(rows, {}, stages=2) == []
