"""Random arrivals, aborts, preemptions and stops against the real scheduler: no token lost, doubled or misplaced."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulated import SimulatedPipeline, make_scheduler
from vllm_handoff.scheduler_ext.engine_share import EngineShare
from vllm_handoff.scheduler_ext.policy import QUIET_TRIPS

MANY = settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))


def test_a_request_alone_fills_every_round(tiny_llama: Path) -> None:
    pipeline = SimulatedPipeline(make_scheduler(tiny_llama, blocks=64))
    pipeline.add("a", prompt=10, budget=20)
    pipeline.finish()
    with_tokens = [m for m in pipeline.rounds if m.num_tokens]
    assert len(with_tokens) == 20
    assert all(b.round - a.round == 1 for a, b in itertools.pairwise(with_tokens))


def test_several_rounds_of_one_request_are_in_flight(tiny_llama: Path) -> None:
    pipeline = SimulatedPipeline(make_scheduler(tiny_llama, blocks=64))
    pipeline.add("a", prompt=10, budget=20)
    while pipeline.schedule():
        pass
    assert [list(output.num_scheduled_tokens) for output in pipeline.in_flight] == [["a"]] * pipeline.depth
    pipeline.finish()


def test_no_round_is_planned_beyond_the_length_cap(tiny_llama: Path) -> None:
    pipeline = SimulatedPipeline(make_scheduler(tiny_llama, blocks=64))
    pipeline.add("a", prompt=10, budget=3)
    pipeline.add("b", prompt=10, budget=1)
    pipeline.finish()
    rows = [output for output in pipeline.rounds if output.num_tokens]
    assert sum(m.num_tokens for m in rows) == 20 + 2
    assert not rows[-1].handoff


def test_one_long_prompt_alone_runs_rounds_without_handoff(tiny_llama: Path) -> None:
    pipeline = SimulatedPipeline(make_scheduler(tiny_llama, blocks=64, max_tokens=32))
    pipeline.add("a", prompt=200, budget=4)
    pipeline.finish()
    chunks = [m for m in pipeline.rounds if m.num_tokens == 32]
    assert len(chunks) == 6
    assert not any(m.handoff for m in chunks)


def test_empty_rounds_stay_here(tiny_llama: Path) -> None:
    pipeline = SimulatedPipeline(make_scheduler(tiny_llama, blocks=64))
    pipeline.add("a", prompt=10, budget=2)
    pipeline.finish()
    assert [m.round for m in pipeline.rounds if m.dispatch and not m.num_tokens and not m.needs] == []


def test_an_id_used_again_while_the_old_one_is_in_flight(tiny_llama: Path) -> None:
    pipeline = SimulatedPipeline(make_scheduler(tiny_llama, blocks=64))
    pipeline.add("a", prompt=10, budget=20)
    while pipeline.schedule():
        pass
    pipeline.abort("a")
    pipeline.add("a", prompt=7, budget=20)
    pipeline.finish()


def test_everything_aborted_at_once(tiny_llama: Path) -> None:
    pipeline = SimulatedPipeline(make_scheduler(tiny_llama, blocks=64))
    for i in range(6):
        pipeline.add(f"r{i}", prompt=10, budget=20)
    while pipeline.schedule():
        pass
    for req_id in pipeline.alive():
        pipeline.abort(req_id)
    pipeline.finish()


def test_little_kv_space_preempts(tiny_llama: Path) -> None:
    pipeline = SimulatedPipeline(make_scheduler(tiny_llama, blocks=12))
    for i in range(8):
        pipeline.add(f"r{i}", prompt=20, budget=60)
    pipeline.finish()
    assert pipeline.preemptions > 0


def test_a_request_whose_last_token_was_dropped_by_a_reset_comes_back(tiny_llama: Path) -> None:
    pipeline = SimulatedPipeline(make_scheduler(tiny_llama, blocks=64))
    pipeline.add("a", prompt=100, budget=1)  # two chunks; then its whole budget is in flight
    assert pipeline.schedule()
    assert pipeline.schedule()
    pipeline.scheduler.reset_prefix_cache(reset_running_requests=True)
    pipeline.finish()


def test_a_burst_is_spread_over_rounds(tiny_llama: Path) -> None:
    pipeline = SimulatedPipeline(make_scheduler(tiny_llama, blocks=80, split_rows=2))
    for i in range(8):
        pipeline.add(f"r{i}", prompt=4, budget=30)
    pipeline.finish()
    decodes = [m.num_tokens for m in pipeline.rounds if m.num_tokens and m.round > 6][:-4]
    assert set(decodes) == {4}


def test_hosts_that_fall_behind_bring_requests_together(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Hosts:
        now = 0.0

        def seconds(self) -> float:
            return self.now

    hosts = Hosts()
    pipeline = SimulatedPipeline(make_scheduler(tiny_llama, blocks=400, pace=hosts))
    for i in range(8):
        pipeline.add(f"r{i}", prompt=4, budget=200)
    while len(pipeline.rounds) < 100:
        if not pipeline.schedule():
            pipeline.collect()
    assert "Hosts set the pace" not in caplog.text
    hosts.now = 1.0
    with caplog.at_level(logging.INFO, logger="vllm_handoff.scheduler_ext.scheduler"):
        pipeline.finish()
    assert caplog.text.count("takes the slowest 1000.0 ms, so 8 decoding requests share every round") == 1
    decodes = [m.num_tokens for m in pipeline.rounds]
    assert set(decodes[10:100]) == {4}
    assert set(decodes[150:-10]) == {8}


def test_an_engine_that_sets_the_pace_says_so_once(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    scheduler = make_scheduler(tiny_llama, blocks=400)
    clock = itertools.count()
    used = {"share": 0.5, "seconds": 0.0}

    def processor() -> float:
        used["seconds"] += used["share"]
        return used["seconds"]

    scheduler._share = EngineShare(lambda: float(next(clock)), processor)
    pipeline = SimulatedPipeline(scheduler)
    for i in range(3):
        pipeline.add(f"r{i}", prompt=4, budget=450)
    with caplog.at_level(logging.INFO, logger="vllm_handoff.scheduler_ext.scheduler"):
        while len(pipeline.rounds) < 200:
            if not pipeline.schedule():
                pipeline.collect()
        assert "The engine sets the pace" not in caplog.text
        used["share"] = 0.95
        pipeline.finish()
    assert caplog.text.count("was at work 95% of the last 64 rounds, with 3 decoding requests") == 1


def test_a_few_requests_share_every_round(tiny_llama: Path) -> None:
    """Cohorts that formed by arrival come together once no prefill has been about for a while."""
    pipeline = SimulatedPipeline(make_scheduler(tiny_llama, blocks=80))
    pipeline.add("first", prompt=4, budget=60)
    pipeline.schedule()
    for i in range(3):
        pipeline.add(f"r{i}", prompt=4, budget=60)
    pipeline.finish()
    decodes = [m.num_tokens for m in pipeline.rounds if m.num_tokens]
    apart = QUIET_TRIPS * pipeline.scheduler._stages
    assert set(decodes[2:apart]) == {1, 3}
    assert len(decodes) > apart + 20 and set(decodes[apart + 3 : -2]) == {4}


def test_prefill_does_not_wait_for_tokens(tiny_llama: Path) -> None:
    """While a long prompt is prefilled, decoding requests keep every second round free of themselves."""
    pipeline = SimulatedPipeline(make_scheduler(tiny_llama, blocks=80, max_tokens=32))
    pipeline.add("a", prompt=4, budget=60)
    for _ in range(4):
        pipeline.schedule()
        pipeline.collect()
    pipeline.add("long", prompt=300, budget=2)
    before = len(pipeline.rounds)
    for _ in range(8):
        pipeline.schedule()
        pipeline.collect()
    chunks = [m for m in pipeline.rounds[before:] if m.num_tokens == 32]
    assert len(chunks) >= 6
    assert sum(not m.handoff for m in chunks) >= 3
    pipeline.finish()


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 9), st.integers(1, 100), st.integers(1, 40), st.integers(0, 40)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("schedule"), st.integers(1, 4)),
        st.tuples(st.just("collect"), st.integers(1, 4)),
        st.tuples(st.just("reset"), st.integers(0, 9)),
        st.tuples(st.just("spread"), st.sampled_from([None, 2, 3, 5])),
    ),
    max_size=40,
)


def test_drafts_that_are_right_save_rounds(tiny_llama: Path) -> None:
    pipeline = SimulatedPipeline(make_scheduler(tiny_llama, blocks=64, drafts=3))
    pipeline.add("a", prompt=10, budget=60)
    pipeline.finish()
    assert len([m for m in pipeline.rounds if m.num_tokens]) < 45


def test_several_rounds_with_drafts_of_one_request_are_in_flight(tiny_llama: Path) -> None:
    pipeline = SimulatedPipeline(make_scheduler(tiny_llama, blocks=64, drafts=3))
    pipeline.add("a", prompt=10, budget=60)
    while pipeline.schedule():
        pass
    assert [output.num_scheduled_tokens for output in pipeline.in_flight] == [{"a": 10}, *[{"a": 4}] * 3]
    assert [manifest.width for manifest in pipeline.rounds] == [4] * 4
    pipeline.finish()


def test_a_small_chunk_leaves_room_for_every_requests_drafts(tiny_llama: Path) -> None:
    pipeline = SimulatedPipeline(make_scheduler(tiny_llama, blocks=200, max_tokens=64, max_seqs=13, drafts=3))
    for i in range(12):
        pipeline.add(f"r{i}", prompt=2, budget=200)
    for _ in range(6):
        pipeline.schedule()
        pipeline.collect()
    chunks = pipeline.scheduler.chunks
    assert chunks is not None
    chunks.least = chunks._peak = 1
    pipeline.add("late", prompt=1, budget=4)
    # Twelve requests of four tokens, and a prompt of one.
    assert pipeline.scheduler._round_budget() >= 12 * 4 + 1


# vLLM's synchronous scheduler with drafts and stages gives wrong tokens, and is refused.
@pytest.mark.parametrize(
    ("asynchronous", "drafts"), [(True, 0), (False, 0), (True, 1), (True, 3)], ids=["async", "sync", "draft", "drafts"]
)
@MANY
@given(
    events=EVENTS,
    blocks=st.sampled_from([12, 20, 80]),
    max_seqs=st.sampled_from([1, 2, 3, 8]),
    split_rows=st.sampled_from([0, 2, 4]),
    prefix_cache=st.booleans(),
)
def test_any_order_of_events(
    tiny_llama: Path,
    asynchronous: bool,
    drafts: int,
    events: list,
    blocks: int,
    max_seqs: int,
    split_rows: int,
    prefix_cache: bool,
) -> None:
    scheduler = make_scheduler(
        tiny_llama, blocks=blocks, max_seqs=max_seqs, asynchronous=asynchronous, split_rows=split_rows, drafts=drafts,
        prefix_cache=prefix_cache,
    )  # fmt: skip
    pipeline = SimulatedPipeline(scheduler)
    for kind, *values in events:
        if kind == "add":
            number, prompt, budget, stop = values
            if f"r{number}" not in pipeline.alive():
                pipeline.add(f"r{number}", prompt, budget, stop_after=stop if 0 < stop < budget else None)
        elif kind == "abort":
            if f"r{values[0]}" in pipeline.alive():
                pipeline.abort(f"r{values[0]}")
        elif kind == "reset":
            scheduler.reset_prefix_cache(reset_running_requests=True)
        elif kind == "spread":
            # As when the hosts' pace changes, long after the last prompt.
            if asynchronous:
                scheduler.rounds_policy.split_from = values[0]
                scheduler.rounds_policy._newest_prefill = -1000
        else:
            step = pipeline.schedule if kind == "schedule" else pipeline.collect
            for _ in range(values[0]):
                step()
    pipeline.finish()
