"""The ledger: over random schedules, every handoff is applied once, in order, and before it is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_handoff.scheduler_ext.ledger import HandoffLedger
from vllm_handoff.scheduler_ext.manifest import Manifest


class Planned(NamedTuple):
    """A request of a round that is about to be opened."""

    req_id: str
    admitted: bool
    samples: bool
    feeds: bool


def decode(req_id: str, feeds: bool = True) -> Planned:
    return Planned(req_id, admitted=False, samples=True, feeds=feeds)


def prompt(req_id: str, complete: bool = True, feeds: bool = True) -> Planned:
    return Planned(req_id, admitted=True, samples=complete, feeds=complete and feeds)


def open_round(ledger: HandoffLedger, rows: Sequence[Planned], num_tokens: int) -> Manifest:
    return ledger.open_round(
        [row.req_id for row in rows],
        num_tokens,
        admitted=[row.req_id for row in rows if row.admitted],
        chunks={row.req_id for row in rows if not row.samples},
        last={row.req_id for row in rows if row.samples and not row.feeds},
    )


def test_a_request_alone_needs_the_round_before() -> None:
    ledger = HandoffLedger(stages=2)
    assert open_round(ledger, [prompt("a")], 5).needs == ()
    assert [open_round(ledger, [decode("a")], 1).needs for _ in range(3)] == [(0,), (1,), (2,)]


def test_alternating_cohorts_need_the_round_before_the_last() -> None:
    ledger = HandoffLedger(stages=2)
    open_round(ledger, [prompt("a")], 5)
    open_round(ledger, [prompt("b")], 5)
    assert [open_round(ledger, [decode(r)], 1).needs for r in "abab"] == [(0,), (1,), (2,), (3,)]


def test_prefill_chunks_hand_nothing_off() -> None:
    ledger = HandoffLedger(stages=2)
    first = open_round(ledger, [prompt("a", complete=False)], 64)
    second = open_round(ledger, [Planned("a", False, False, False)], 64)
    assert (first.handoff, second.handoff, second.needs) == (False, False, ())
    last = open_round(ledger, [Planned("a", False, True, True)], 3)
    assert last.handoff
    assert last.needs == ()


def test_a_first_sample_at_the_length_cap_hands_nothing_off() -> None:
    ledger = HandoffLedger(stages=2)
    assert not open_round(ledger, [prompt("a", feeds=False)], 5).handoff


def test_one_row_that_feeds_sends_the_whole_batch() -> None:
    ledger = HandoffLedger(stages=2)
    manifest = open_round(ledger, [prompt("a", feeds=False), prompt("b")], 9)
    assert [(row.req_id, row.feeds) for row in manifest.rows] == [("a", False), ("b", True)]


def test_a_handoff_nobody_needs_is_applied_all_the_same() -> None:
    ledger = HandoffLedger(stages=2)
    open_round(ledger, [prompt("a")], 5)
    ledger.forget(["a"])
    assert open_round(ledger, [prompt("b")], 5).needs == ()
    assert open_round(ledger, [decode("b")], 1).needs == (0, 1)


def test_going_idle_drains_what_is_under_way() -> None:
    ledger = HandoffLedger(stages=2)
    open_round(ledger, [prompt("a")], 5)
    open_round(ledger, [decode("a")], 1)
    ledger.forget(["a"])
    idle = ledger.open_empty_round(drain=True, dispatch=False)
    assert (idle.needs, idle.dispatch) == ((1,), True)
    assert not ledger.open_empty_round(drain=True, dispatch=False).dispatch


def test_a_request_that_the_workers_do_not_know_is_caught() -> None:
    ledger = HandoffLedger(stages=2)
    with pytest.raises(AssertionError, match="never admitted"):
        open_round(ledger, [decode("a")], 1)


def test_an_id_used_again_is_another_life() -> None:
    ledger = HandoffLedger(stages=2)
    first = open_round(ledger, [prompt("a")], 5)
    ledger.forget(["a"])
    second = open_round(ledger, [prompt("a")], 5)
    assert first.rows.generations != second.rows.generations


def test_one_stage_never_hands_off() -> None:
    ledger = HandoffLedger(stages=1)
    assert not any(open_round(ledger, [row], 1).handoff for row in (prompt("a"), decode("a"), decode("a")))


def test_one_stage_does_not_mind_a_wrong_guess() -> None:
    ledger = HandoffLedger(stages=1)
    open_round(ledger, [prompt("a", feeds=False)], 5)
    assert open_round(ledger, [decode("a")], 1).needs == ()


def test_decoding_after_the_last_sample_is_caught() -> None:
    ledger = HandoffLedger(stages=2)
    open_round(ledger, [prompt("a", feeds=False)], 5)
    with pytest.raises(AssertionError, match="declared the last"):
        open_round(ledger, [decode("a")], 1)


EVENTS = st.lists(st.tuples(st.sampled_from("NNDDDDFEI"), st.integers(0, 5), st.booleans()), max_size=60)


@given(EVENTS, st.integers(2, 5))
def test_every_handoff_is_applied_once_in_order_and_in_time(events: list, stages: int) -> None:
    ledger = HandoffLedger(stages)
    applied: list[int] = []
    handed_off: list[int] = []
    newest: dict[str, int] = {}
    alive: list[str] = []
    born = 0
    for kind, number, flag in events:
        if kind == "N":
            alive.append(f"r{born}")
            manifest = open_round(ledger, [prompt(f"r{born}")], 4)
            newest[f"r{born}"] = manifest.round
            born += 1
        elif kind == "F" and alive:
            gone = alive.pop(number % len(alive))
            ledger.forget([gone])
            continue
        elif kind == "D" and alive:
            chosen = alive[number % len(alive) :] if flag else [alive[number % len(alive)]]
            manifest = open_round(ledger, [decode(r) for r in chosen], len(chosen))
            for r in chosen:
                assert newest[r] in applied + list(manifest.needs)
                newest[r] = manifest.round
        else:
            manifest = ledger.open_empty_round(drain=kind == "I", dispatch=flag)
        applied += manifest.needs
        if manifest.handoff:
            handed_off.append(manifest.round)
        if manifest.num_tokens:
            assert all(manifest.round - round_ < stages for round_ in ledger.pending)
    applied += ledger.open_empty_round(drain=True, dispatch=False).needs
    assert applied == handed_off
