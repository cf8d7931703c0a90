"""Even rounds: their caps, who waits, and from when splitting is worthwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_handoff.scheduler_ext.policy import QUIET_TRIPS, WORTHWHILE, EvenRounds, PipelineTime, StagePoint, StageTime
from vllm_handoff.scheduler_ext.settings import HandoffSettings, SettingsError


def test_a_line_is_fitted() -> None:
    line = [StagePoint(1, 0, 2.1), StagePoint(11, 0, 3.1), StagePoint(21, 0, 4.1)]
    assert StageTime.fit(line) == pytest.approx(StageTime(2.0, 0.1))
    # Rounds with context are measured in another way, here with 5 more.
    time = StageTime.fit([*line, StagePoint(10, 10, 5 + 4.0), StagePoint(10, 50, 5 + 8.0)])
    assert time == pytest.approx(StageTime(2.0, 0.1, 0.01))
    assert time.of(10, 50) == pytest.approx(8.0)


def test_noise_never_makes_a_part_negative() -> None:
    points = [(1, 0, 2.0), (2, 0, 1.0), (2, 1, 0.7), (2, 9, 0.5)]
    assert StageTime.fit([StagePoint(*point) for point in points])[1:] == (0, 0)


def test_splitting_starts_where_it_is_worthwhile() -> None:
    policy = EvenRounds(2, None, PipelineTime((StageTime(2.6e-3, 12e-6),) * 2))
    rows = policy.spreads_from(512)
    assert rows is not None

    def gain(n: int) -> float:
        time = StageTime(2.6e-3, 12e-6)
        return 1 - time.of(n / 2) / time.of(n)

    assert gain(rows) >= WORTHWHILE > gain(rows - 1)


def test_a_stage_whose_time_does_not_grow_is_never_split() -> None:
    assert EvenRounds(2, None, PipelineTime((StageTime(1e-3, 0.0),) * 2)).spreads_from(512) is None
    assert EvenRounds(1, None, PipelineTime((StageTime(1e-3, 1e-6),))).parts(512) == 1
    assert EvenRounds(4, None).parts(512) == 1


def test_what_hosts_cannot_launch_in_time_is_not_spread() -> None:
    four, two = (PipelineTime((StageTime(1.3e-3, 8e-6),) * stages) for stages in (4, 2))
    assert four.parts(256) == 4
    # All together take the devices 13.4 ms, in two rounds 9.3; four rounds would take the hosts 12.8, three 9.6.
    assert four.parts(256, host=3.2e-3) == 2
    assert four.parts(256, host=2e-3) == 3
    assert four.parts(256, host=7e-3) == 1
    # At two stages: 64 together in 3.6 ms, in two rounds 3.1 ms, or as long as the hosts need.
    assert [two.parts(64, host=host) for host in (0, 1.5e-3, 2e-3, 3e-3)] == [2, 2, 1, 1]


def test_the_more_context_the_sooner_requests_are_spread() -> None:
    policy = EvenRounds(2, None, PipelineTime((StageTime(2.6e-3, 12e-6, 8e-9),) * 2))
    few = policy.spreads_from(512)
    policy.context = 4000
    assert few is not None and 2 * (policy.spreads_from(512) or 0) < few


def test_the_last_stage_has_more_to_do_in_every_round() -> None:
    # Two rounds pass four stages in 5.5 ms; four would take the last one 6.5, whose head costs 0.4 ms each.
    stages = (StageTime(1.2e-3, 2e-6),) * 3 + (StageTime(1.6e-3, 2e-6),)
    time = PipelineTime(stages)
    assert [time.trip(64, parts) for parts in (2, 3, 4)] == pytest.approx([5.456e-3, 5.371e-3, 6.528e-3], rel=1e-3)
    assert time.parts(64) == 3


_TIMES = st.builds(StageTime, st.floats(1e-5, 1e-1), st.floats(0, 1e-3), st.just(0.0))


@given(st.lists(_TIMES, min_size=1, max_size=16), st.integers(1, 1000), st.floats(0, 1e-1))
def test_spreading_never_makes_a_trip_longer(stages: list[StageTime], live: int, host: float) -> None:
    time = PipelineTime(tuple(stages))
    parts = time.parts(live, host=host)
    assert 1 <= parts <= max(1, min(len(stages), live))
    best = min(time.trip(live, other, host=host) for other in range(1, min(len(stages), live) + 1))
    chosen = time.trip(live, parts, host=host)
    assert chosen <= time.trip(live, 1, host=host)
    # Within what another round has to gain, of the best.
    assert chosen * (1 - WORTHWHILE) <= best * (1 + 1e-9)


def test_the_cap_follows_the_live_number() -> None:
    policy = EvenRounds(stages=2, split_from=10)
    assert [policy.cap(live, turn=1) for live in (3, 9, 10, 11, 256)] == [3, 9, 5, 6, 128]
    assert EvenRounds(stages=2, split_from=None).cap(256, turn=1) == 256


@given(st.integers(2, 1000), st.integers(2, 16), st.integers(0, 1000))
def test_caps_of_a_trip_add_up_and_differ_by_one(live: int, stages: int, turn: int) -> None:
    policy = EvenRounds(stages, split_from=2)
    caps = [policy.cap(live, turn + i) for i in range(stages)]
    if live >= stages:
        assert sum(caps) == live and max(caps) - min(caps) <= 1
    else:
        assert set(caps) == {1}


def test_few_requests_come_together_once_no_prompt_has_arrived_for_a_while() -> None:
    policy = EvenRounds(stages=2, split_from=10)
    quiet = 2 * QUIET_TRIPS
    assert [policy.lead(3, turn, prefill_is_due=turn < 5) for turn in range(4 + quiet)] == [0] * (4 + quiet)
    assert policy.lead(3, 4 + quiet, prefill_is_due=False) == 0
    assert policy.lead(3, 5 + quiet, prefill_is_due=False) == 1
    assert policy.lead(10, 6 + quiet, prefill_is_due=False) == 0
    assert policy.lead(3, 7 + quiet, prefill_is_due=True) == 0


def test_requests_spread_over_fewer_rounds_than_stages_come_round_the_sooner() -> None:
    policy = EvenRounds(4, None, PipelineTime((StageTime(1.3e-3, 8e-6),) * 4))
    policy.host_seconds = 3.2e-3
    quiet = 4 * QUIET_TRIPS + 1
    assert policy.parts(256) == 2 and policy.lead(256, quiet, prefill_is_due=False) == 2
    assert [policy.cap(255, turn) for turn in range(4)] == [127, 128, 127, 128]


def test_the_longest_waiting_go_first() -> None:
    policy = EvenRounds(stages=2, split_from=2)
    assert policy.hold_back([(7, "a"), (5, "b"), (6, "c"), (5, "d")], live=4, turn=0) == ["c", "a"]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=80), st.integers(2, 6), st.integers(0, 10_000))
def test_rounds_are_even_after_two_trips_and_nobody_starves(sizes: list[int], stages: int, seed: int) -> None:
    """Cohorts of any sizes, left alone, are even after two trips, and every request is served on each."""
    policy = EvenRounds(stages, split_from=2)
    eligible = {f"{i}.{j}": i % stages for i, size in enumerate(sizes) for j in range(size)}
    live = len(eligible)
    last = dict.fromkeys(eligible, -1)
    counts = []
    for step in range(6 * stages):
        ready = [(at, req_id) for req_id, at in eligible.items() if at <= step]
        held = set(policy.hold_back(ready, live, step))
        served = [req_id for _, req_id in ready if req_id not in held]
        for req_id in served:
            assert step - max(last[req_id], 0) <= 2 * stages
            last[req_id] = step
            eligible[req_id] = step + stages
        counts.append(len(served))
    if live >= 2:
        steady = counts[2 * stages :]
        if live >= stages:
            assert max(steady) - min(steady) <= 1
        for trip in range(2, 6):
            assert sum(counts[trip * stages : (trip + 1) * stages]) == live


def _config(settings: Any, stages: int = 2) -> Any:
    return SimpleNamespace(
        additional_config={"handoff": settings}, parallel_config=SimpleNamespace(pipeline_parallel_size=stages)
    )


def test_settings_have_defaults() -> None:
    settings = HandoffSettings.of(SimpleNamespace(additional_config={}, parallel_config=_config({}).parallel_config))
    assert [settings.rounds_in_flight(stages) for stages in (2, 4, 8)] == [4, 6, 10]
    assert HandoffSettings.of(_config({"depth": 3})).rounds_in_flight(2) == 3


@pytest.mark.parametrize(
    "settings, what",
    [
        ({"depth": 1}, "out of range: 2 stages take 2 to 8"),
        ({"depth": 9}, "out of range"),
        ({"depth": "deep"}, "out of range"),
        ({"prefill_chunks": 512}, 'must be "auto" or "budget"'),
        ({"rendezvous": "no"}, "rendezvous 'no' must be true or false"),
        ({"share_gpu": 1}, "share_gpu 1 must be true or false"),
        ({"split_rows": -1}, "split_rows"),
        ({"colour": 1}, "no setting 'colour'; there are depth, split_rows, layer_split"),
        ({"layer_split": "17,15"}, "layer_split '17,15' must be"),
        ("deep", "must be an object"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(settings: Any, what: str) -> None:
    with pytest.raises(SettingsError, match=what):
        HandoffSettings.of(_config(settings))
