"""What must hold in every simulated run, with either policy: over random loads, limits, stop tokens and KV space."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_handoff.scheduler_ext.model_shape import LayerShape, ModelShape
from vllm_handoff.scheduler_ext.policy import EvenRounds, PipelineTime, StageTime
from vllm_handoff.scheduler_ext.stage_cost import H200, stage_costs
from vllm_handoff.simulator.pipeline import HostTimes, Run, SimulatedPipeline, Stage
from vllm_handoff.simulator.requests import Arrivals, SimulatedRequest, burst, closed_loop, draining
from vllm_handoff.simulator.scheduling import BLOCK, EvenScheduler, Limits, SimulatedScheduler

MODEL = ModelShape((LayerShape(218_000_000),) * 16, hidden=4096, vocab=128_256, attention_width=4096, kv_width=2048)
HOST = HostTimes(3e-4, 3e-6, 2e-4, 4e-6, 1e-4, 1e-4, 2e-4, 2e-5, 2e-5, 1e-4, 4e-5, 3e-3)


def pipeline(policy: str, stages: int, limits: Limits | None = None, split_from: int | None = 2) -> SimulatedPipeline:
    limits = limits or Limits()
    layers = [16 // stages] * stages
    layers[0] += 16 - sum(layers)
    costs = stage_costs(MODEL, layers, H200)
    scheduler = SimulatedScheduler(stages, limits) if policy == "vllm" else EvenScheduler(stages, limits, split_from)
    depth = stages + 1 if policy == "vllm" else 2 * stages
    return SimulatedPipeline(scheduler, [Stage(*pair) for pair in zip(costs, layers)], HOST, depth)


REQUESTS = st.lists(
    st.builds(
        dict,
        arrival=st.floats(0, 0.2),
        prompt=st.integers(1, 200),
        budget=st.integers(1, 20),
        stop_after=st.none() | st.integers(1, 20),
    ),
    min_size=1,
    max_size=25,
)


def made(fields: list[dict]) -> Arrivals:
    return Arrivals([SimulatedRequest(number, **each) for number, each in enumerate(fields)])


@settings(max_examples=60, deadline=None)
@given(
    REQUESTS,
    st.sampled_from(["vllm", "ours"]),
    st.integers(1, 5),
    st.integers(1, 64),
    st.integers(1, 12),
    st.none() | st.integers(16, 40),
    st.none() | st.integers(2, 12),
)
def test_every_run_is_sound(
    fields: list[dict],
    policy: str,
    stages: int,
    tokens: int,
    running: int,
    kv_blocks: int | None,
    split_from: int | None,
) -> None:
    limits = Limits(tokens, running, None if kv_blocks is None else kv_blocks * BLOCK)
    simulated = pipeline(policy, stages, limits, split_from)
    run = simulated.run(made(fields), most_rounds=100_000)
    check_conservation(run, simulated.scheduler)
    check_limits(run, limits)
    check_order(run)
    assert run.most_in_flight <= simulated.depth
    # All KV space came back.
    assert not simulated.scheduler.running and not simulated.scheduler.waiting
    assert simulated.scheduler.free_blocks == (1 << 60 if kv_blocks is None else kv_blocks)


def check_conservation(run: Run, scheduler: SimulatedScheduler) -> None:
    sampled = sum(row.samples for round_ in run.rounds for row in round_.rows)
    assert run.generated == sum(request.length for request in run.requests)
    assert sampled == run.generated + scheduler.wasted_rows
    for request in run.requests:
        assert request.known == request.length <= request.budget
        assert request.planned <= request.budget
        if not request.generation:  # a request that was never preempted computes each token of its prompt once
            rows = [row for round_ in run.rounds for row in round_.rows if row.request is request]
            assert sum(row.tokens for row in rows) == request.prompt + request.planned - 1


def check_limits(run: Run, limits: Limits) -> None:
    for round_ in run.rounds:
        assert round_.tokens == sum(row.tokens for row in round_.rows) <= limits.tokens
        assert len(round_.rows) <= limits.requests
        assert len({row.request.number for row in round_.rows}) == len(round_.rows)


def check_order(run: Run) -> None:
    for request in run.requests:
        assert request.rounds == sorted(set(request.rounds))
        assert request.times == sorted(request.times)
    full = [round_ for round_ in run.rounds if round_.rows]
    by_number = {round_.number: round_ for round_ in full}
    for before, after in pairwise(full):
        for stage in range(len(after.begins)):
            assert after.begins[stage] >= before.ends[stage]
    for round_ in full:
        assert list(round_.begins) == sorted(round_.begins)
        assert all(begin < end for begin, end in zip(round_.begins, round_.ends))
        if round_.needs >= 0:  # no round decodes a token before it was sampled
            assert round_.needs < round_.number
            assert round_.begins[0] >= by_number[round_.needs].ends[-1]


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 60), st.integers(2, 6), st.integers(1, 300))
def test_rounds_are_even_after_two_trips_and_everybody_is_served_on_each(count: int, stages: int, prompt: int) -> None:
    run = pipeline("ours", stages).run(Arrivals(burst(count, prompt, 30)))
    # No prefill any more, and everybody has more than the rounds in flight to go.
    decoding = [made for made in run.rounds if made.live == count and not made.work.prompt_tokens]
    steady = decoding[2 * stages : -3 * stages]
    assert steady
    for trip in zip(*(steady[offset:] for offset in range(stages))):
        rows = [made.decodes for made in trip]
        if count >= stages:
            assert max(rows) - min(rows) <= 1
            assert sum(rows) == count == len({row.request.number for made in trip for row in made.rows})
        else:
            assert set(rows) == {1}


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 60), st.integers(2, 6), st.integers(0, 1000), st.integers(2, 20))
def test_nobody_waits_longer_than_two_trips(clients: int, stages: int, seed: int, split_from: int) -> None:
    """While requests come and go too, as long as a round has room for everybody."""
    run = pipeline("ours", stages, split_from=split_from).run(closed_loop(clients, 3 * clients, 24, (1, 30), seed))
    assert max(request.longest_wait for request in run.requests) <= 2 * stages


_STAGE = st.builds(StageTime, st.floats(1e-3, 2e-3), st.floats(0, 1e-4), st.just(1e-8))
_STAGES = st.lists(_STAGE, min_size=2, max_size=6)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 60), _STAGES, st.floats(0, 5e-3), st.integers(0, 1000))
def test_so_too_when_hosts_limit_the_rounds(clients: int, times: list[StageTime], host: float, seed: int) -> None:
    simulated = pipeline("ours", len(times), split_from=None)
    scheduler = simulated.scheduler
    assert isinstance(scheduler, EvenScheduler)
    scheduler.policy = EvenRounds(len(times), None, PipelineTime(tuple(times)))
    scheduler.policy.host_seconds = host
    run = simulated.run(closed_loop(clients, 3 * clients, 24, (1, 90), seed))
    assert all(request.finished for request in run.requests)
    assert max(request.longest_wait for request in run.requests) <= 2 * len(times)


@pytest.mark.parametrize("stages", [2, 3, 8])
def test_one_request_alone_is_in_every_round(stages: int) -> None:
    ours = pipeline("ours", stages).run(Arrivals(burst(1, 16, 50)))
    theirs = pipeline("vllm", stages).run(Arrivals(burst(1, 16, 50)))
    assert sum(bool(round_.rows) for round_ in ours.rounds) == 50
    # Empty ones only at the end, when everything it may have is in flight.
    assert sum(not round_.rows for round_ in ours.rounds) == 2 * stages - 1
    assert sum(not round_.rows for round_ in theirs.rounds) >= 49 * (stages - 1)


def test_a_burst_is_one_cohort_for_vllm_and_even_for_ours() -> None:
    theirs = pipeline("vllm", 2).run(Arrivals(burst(64, 16, 20)))
    ours = pipeline("ours", 2).run(Arrivals(burst(64, 16, 20)))
    assert {round_.decodes for round_ in theirs.rounds[1:40]} == {0, 64}
    assert {round_.decodes for round_ in ours.rounds[1:38]} == {32}


def test_what_remains_of_a_burst_shares_every_round() -> None:
    run = pipeline("ours", 2, split_from=8).run(Arrivals(draining(64, 3, 16, 10, 60)))
    tail = [round_.decodes for round_ in run.rounds if round_.live == 3 and round_.rows]
    assert len(tail) > 40 and set(tail) == {3}


def test_a_run_is_the_same_every_time() -> None:
    first, second = (pipeline("ours", 4).run(closed_loop(20, 60, 30, (5, 25), seed=3)) for _ in range(2))
    assert first.seconds == second.seconds
    assert [request.times for request in first.requests] == [request.times for request in second.requests]


def test_an_aborted_request_gets_nothing_more_and_gives_its_space_back() -> None:
    scheduler = EvenScheduler(2, Limits(kv_tokens=64 * BLOCK), 2)
    requests = burst(4, 16, 10)
    scheduler.add(requests)
    first = scheduler.schedule()
    scheduler.abort(requests[1])
    second = scheduler.schedule()
    assert requests[1] not in [row.request for row in second.rows]
    scheduler.update(first, 1.0)
    scheduler.update(second, 2.0)
    assert requests[1].known == 0 and all(request.known for request in requests if request is not requests[1])
    assert scheduler.wasted_rows == 1
    assert scheduler.free_blocks == 64 - sum(request.blocks for request in scheduler.running.values())


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="KV blocks"):
        SimulatedScheduler(2, Limits(kv_tokens=32)).add(burst(1, 100, 10))
