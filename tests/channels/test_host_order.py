"""No order of launches may let hosts and streams wait in a circle, although any host may have to wait for its streams.

A model of what each stage's host puts into which stream, round by round, and
of hosts that stop anywhere until all of their streams are done, as they do
when a kernel is loaded at its first use. The model only ever goes forward, so
it gets as far as it can whatever is tried first: if it stops early, it hangs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

BUFFERS = 2  # of a hop's sender


@dataclass
class Step:
    """Something in a stream: done once all in `after` is done, and the link's other end is there, if it has one."""

    after: list[Step]
    other_end: Callable[[], Step | None] = lambda: None
    transfer: bool = False
    done: bool = False
    previous: Step | None = None

    def arrived(self) -> bool:
        return all(step.done for step in self.after) and (self.previous is None or self.previous.done)

    def advance(self) -> bool:
        """Whether it is done now and was not before."""
        if self.done or not self.arrived():
            return False
        if self.transfer:
            other = self.other_end()
            if other is None or not (other.done or other.arrived()):
                return False
        self.done = True
        return True


@dataclass
class Stage:
    streams: dict[str, list[Step]] = field(default_factory=dict)

    def put(self, stream: str, *after: Step | None, **transfer: object) -> Step:
        steps = self.streams.setdefault(stream, [])
        step = Step([a for a in after if a is not None], previous=steps[-1] if steps else None, **transfer)  # type: ignore[arg-type]
        steps.append(step)
        return step

    def newest(self, stream: str) -> Step | None:
        return self.streams[stream][-1] if self.streams.get(stream) else None

    def idle(self) -> bool:
        return all(steps[-1].done for steps in self.streams.values() if steps)


class Pipeline:
    """Args: stages, rounds, lag (a round decodes the tokens of the one so many before), depth, whether receives of
    handoffs are posted in their own round, and the places at which hosts stop until their streams are done."""

    def __init__(self, stages: int, rounds: int, lag: int, depth: int, early: bool, stops: set[tuple[int, int, int]]):
        self.stages = [Stage() for _ in range(stages)]
        self.rounds, self.lag, self.depth, self.early, self.stops = rounds, lag, depth, early, stops
        self.ends: dict[tuple[str, int, int, str], Step] = {}  # (link, stage it starts at, round, end)
        self.outputs: list[Step] = []
        self.reached = [0] * stages

    def host(self, index: int) -> Iterator[Callable[[], bool]]:
        """What a host does; yields what it waits for."""
        stage, last = self.stages[index], len(self.stages) - 1
        for number in range(self.rounds):
            self.reached[index] = number
            yield functools.partial(self.is_dispatched, number)
            place = 0

            def stop(number: int = number) -> Callable[[], bool]:
                nonlocal place
                place += 1
                return stage.idle if (index, number, place) in self.stops else lambda: True

            yield stop()
            if index == 0 and number >= self.lag:
                needed = number - self.lag
                if not self.early:
                    self.transfer(stage, "compute", "handoff", last, needed, "receive")
                stage.put("compute", self.ends["handoff", last, needed, "receive"])
            yield stop()
            if index > 0:
                hop = self.transfer(stage, "hop in", "hop", index - 1, number, "receive", stage.newest("compute"))
                yield stop()
                stage.put("compute", hop)
            stage.put("compute")
            yield stop()
            if index < last:
                old = self.ends.get(("hop", index, number - BUFFERS, "send"))
                copied = stage.put("compute", old)
                self.transfer(stage, "hop out", "hop", index, number, "send", copied)
            else:
                sampled = stage.put("compute")
                self.transfer(stage, "handoff", "handoff", last, number, "send", sampled)
                self.outputs.append(sampled)
            yield stop()
            if index == 0 and self.early:
                self.transfer(stage, "handoff", "handoff", last, number, "receive", stage.newest("compute"))
            yield stop()
        self.reached[index] = self.rounds

    def is_dispatched(self, number: int) -> bool:
        """Whether the engine has sent the round to the hosts, which it does once the output `depth` before is there."""
        collected = number - self.depth
        return collected < 0 or (len(self.outputs) > collected and self.outputs[collected].done)

    def transfer(self, stage: Stage, stream: str, link: str, start: int, number: int, end: str, *after: object) -> Step:
        other = "receive" if end == "send" else "send"
        step = stage.put(stream, *after, transfer=True, other_end=lambda: self.ends.get((link, start, number, other)))  # type: ignore[arg-type]
        self.ends[link, start, number, end] = step
        return step

    def run(self) -> bool:
        """Go as far as possible. Whether every host came to its end."""
        hosts = [self.host(index) for index in range(len(self.stages))]
        waits: list[Callable[[], bool] | None] = [next(host) for host in hosts]
        moved = True
        while moved:
            moved = False
            for index, host in enumerate(hosts):
                while (wait := waits[index]) is not None and wait():
                    waits[index] = next(host, None)
                    moved = True
            for stage in self.stages:
                for steps in stage.streams.values():
                    for step in steps:
                        moved |= step.advance()
        return all(wait is None for wait in waits)


ROUNDS = 7
PLACES = st.tuples(st.integers(0, 3), st.integers(0, ROUNDS - 1), st.integers(1, 6))


@settings(max_examples=300, deadline=None)
@given(st.integers(2, 4), st.integers(1, 4), st.integers(0, 4), st.sets(PLACES, max_size=40))
def test_hosts_that_stop_anywhere_never_stop_for_good(
    stages: int, lag: int, more: int, stops: set[tuple[int, int, int]]
) -> None:
    pipeline = Pipeline(stages, ROUNDS, lag, stages + more, early=True, stops=stops)
    assert pipeline.run(), f"hosts are in rounds {pipeline.reached}"


def test_hosts_that_stop_everywhere_never_stop_for_good() -> None:
    stops = {(index, number, place) for index in range(4) for number in range(ROUNDS) for place in range(1, 7)}
    for stages in (2, 3, 4):
        for lag in (1, 2, 4):
            assert Pipeline(stages, ROUNDS, lag, stages + 2, early=True, stops=stops).run()


def test_a_receive_posted_where_it_is_needed_hangs_as_it_did_on_two_gpus() -> None:
    stops = {(index, number, place) for index in range(2) for number in range(ROUNDS) for place in range(1, 7)}
    pipeline = Pipeline(2, ROUNDS, 2, 4, early=False, stops=stops)
    assert not pipeline.run()
    assert max(pipeline.reached) < ROUNDS
    assert Pipeline(2, ROUNDS, 2, 4, early=False, stops=set()).run(), "without such stops it does not show"
