"""The short answers about KV blocks are those that vLLM's methods give at length."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulated import SimulatedPipeline, make_scheduler
from vllm_handoff.scheduler_ext.kv_room import skip_where_there_is_room

MANY = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))

ADD = st.tuples(st.just("add"), st.integers(1, 70), st.integers(1, 60), st.integers(0, 70))
STEPS = st.tuples(st.sampled_from(["schedule", "collect"]), st.integers(1, 6))
ABORT = st.tuples(st.just("abort"), st.integers(0, 20))


def pipelines(model: Path, **options: Any) -> tuple[SimulatedPipeline, SimulatedPipeline, list[int]]:
    """One with short answers, one with vLLM's alone, and how often the first asked for vLLM's all the same."""
    short, long = (SimulatedPipeline(make_scheduler(model, **options)) for _ in range(2))
    for name in ("allocate_slots", "cache_blocks"):
        vars(long.scheduler.kv_cache_manager).pop(name, None)
    asked = [0, 0]
    coordinator = short.scheduler.kv_cache_manager.coordinator

    def counted(original: Any, place: int) -> Any:
        def count(*args: Any, **kwargs: Any) -> Any:
            asked[place] += 1
            return original(*args, **kwargs)

        return count

    coordinator.allocate_new_blocks = counted(coordinator.allocate_new_blocks, 0)
    coordinator.cache_blocks = counted(coordinator.cache_blocks, 1)
    return short, long, asked


def plan(pipeline: SimulatedPipeline) -> Any:
    """What the newest round says of blocks."""
    output = pipeline.in_flight[-1]
    cached = output.scheduled_cached_reqs
    return (
        output.num_scheduled_tokens,
        dict(zip(cached.req_ids, cached.new_block_ids, strict=True)),
        {new.req_id: (new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs},
        output.preempted_req_ids,
    )


def held(pipeline: SimulatedPipeline) -> list[dict[str, list[int]]]:
    """Of each group and request the blocks that it has; of those that a window has left, only that there were some."""
    groups = pipeline.scheduler.kv_cache_manager.coordinator.single_type_managers
    return [
        {req_id: [block.block_id for block in blocks] for req_id, blocks in group.req_to_blocks.items() if blocks}
        for group in groups
    ]


def run(pipeline: SimulatedPipeline, number: int, event: tuple) -> None:
    kind, *values = event
    if kind == "add":
        prompt, budget, stop = values
        pipeline.add(f"r{number}", prompt, budget, stop_after=stop if 0 < stop < budget else None)
    elif kind == "abort":
        alive = pipeline.alive()
        if alive:
            pipeline.abort(alive[values[0] % len(alive)])


@pytest.mark.parametrize(("drafts", "window"), [(0, 0), (3, 0), (0, 5), (0, 40), (3, 16)])
@MANY
@given(events=st.lists(ADD | STEPS | ABORT, max_size=40), blocks=st.sampled_from([12, 20, 80]))
def test_every_round_gets_the_same_blocks(
    tiny_llama: Path, drafts: int, window: int, events: list, blocks: int
) -> None:
    short, long, _ = pipelines(tiny_llama, blocks=blocks * (2 if window else 1), drafts=drafts, window=window)
    for number, event in enumerate(events):
        if event[0] in ("add", "abort"):
            run(short, number, event)
            run(long, number, event)
            continue
        for _ in range(event[1]):
            if event[0] == "collect":
                assert short.collect() == long.collect()
            elif short.schedule() | long.schedule():
                assert plan(short) == plan(long)
                assert held(short) == held(long)
    short.finish()
    long.finish()
    assert short.rounds == long.rounds


@pytest.mark.parametrize("window", [0, 20])
@MANY
@given(requests=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 60), st.integers(0, 70)), max_size=8))
def test_the_same_blocks_end_up_in_the_prefix_cache(tiny_llama: Path, window: int, requests: list) -> None:
    short, long, _ = pipelines(tiny_llama, blocks=400, prefix_cache=True, window=window)
    for pipeline in (short, long):
        for number, request in enumerate(requests):
            run(pipeline, number, ("add", *request))
        pipeline.finish()
    assert short.rounds == long.rounds

    def cached(pipeline: SimulatedPipeline) -> set:
        return set(pipeline.scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache)

    assert cached(short) == cached(long)


@pytest.mark.parametrize("window", [0, 40])
def test_vllm_is_asked_once_a_block(tiny_llama: Path, window: int) -> None:
    short, long, asked = pipelines(tiny_llama, blocks=80, prefix_cache=True, window=window)
    short.add("a", prompt=16, budget=161)
    short.finish()
    long.add("a", prompt=16, budget=161)
    long.finish()
    # 16 tokens of a prompt and 160 decoded ones fill eleven blocks; the last token takes none.
    # A window is left by eight of them, a few tokens after a new one was taken.
    assert asked[0] == 11 + (8 if window else 0)
    assert asked[1] <= 3 * 11


def test_other_kinds_of_kv_are_left_alone() -> None:
    manager: Any = SimpleNamespace(coordinator=SimpleNamespace(single_type_managers=[object()]))
    assert not skip_where_there_is_room(manager)
