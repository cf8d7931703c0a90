"""The record of rounds that each rank keeps."""

from __future__ import annotations

import pytest

from vllm_handoff.worker.timeline import Timeline


@pytest.mark.parametrize("rounds", [0, 1, 3, 4, 5, 11])
def test_the_last_rounds_are_kept_in_order(rounds: int) -> None:
    timeline = Timeline(capacity=4)
    for number in range(100, 100 + rounds):
        timeline.begin(number)
        timeline.end()
    # A second end belongs to no round.
    timeline.end()
    kept = timeline.rounds()
    assert [number for number, _, _ in kept] == list(range(100, 100 + rounds))[-4:]
    times = [time for _, begin, end in kept for time in (begin, end)]
    assert times == sorted(times)
    assert all(isinstance(value, int) for entry in kept for value in entry)
