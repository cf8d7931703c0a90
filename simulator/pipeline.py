"""The engine's loop and its stages on a clock of their own.

Every queue here is first in, first out: the engine is one thread, a stage's
host launches rounds in order and so does its device. So the times of a round
follow from those of the rounds before it, and the simulation is a recurrence
that needs no queue of events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_handoff.scheduler_ext.stage_cost import StageCost
from vllm_handoff.simulator.requests import Arrivals
from vllm_handoff.simulator.scheduling import SimulatedRound, SimulatedScheduler


@dataclass(frozen=True)
class HostTimes:
    """What happens beside the devices' own work, in seconds.

    Attributes:
        plan, plan_row: of the engine's thread to plan and send a round, and more for each of its rows.
        collect, collect_row: of the engine's thread to take in a round's tokens.
        message: from the engine to a stage's host.
        launch: of a stage's host for a round that is replayed as a CUDA graph (decoding rows alone).
        launch_layer: of a stage's host for a layer of any other round.
        hop: a round's hidden states from a stage to the next.
        handoff: sampled tokens from the last stage to the first.
        output: sampled tokens from the last stage's device to the engine.
        admit: between two requests of a burst, as a client hands them over.
        around: of a whole run, before its first round and after its last.
    """

    plan: float
    plan_row: float
    collect: float
    collect_row: float
    message: float
    launch: float
    launch_layer: float
    hop: float
    handoff: float
    output: float
    admit: float
    around: float


class Stage(NamedTuple):
    """One stage: its cost, and its layers for the host that launches them."""

    cost: StageCost
    layers: int


@dataclass
class Run:
    """What came out of a simulation.

    Attributes:
        seconds: from the first arrival to the last token at the client.
        requests: all requests, with their tokens' times.
        rounds: all rounds, with their stages' times.
        busy: for each stage, the seconds its device worked.
        most_in_flight: rounds.
    """

    seconds: float
    requests: list
    rounds: list[SimulatedRound]
    busy: list[float] = field(default_factory=list)
    most_in_flight: int = 0

    @property
    def generated(self) -> int:
        """Tokens."""
        return sum(request.known for request in self.requests)

    @property
    def throughput(self) -> float:
        """Generated tokens a second."""
        return self.generated / self.seconds

    def gaps(self) -> list[float]:
        """Seconds between a request's tokens, over all requests, shortest first."""
        return sorted(b - a for request in self.requests for a, b in zip(request.times, request.times[1:]))


class SimulatedPipeline:
    """Runs a scheduler's rounds through stages.

    Args:
        scheduler: who decides what a round holds.
        stages: first to last.
        host: everything but the devices' own work.
        depth: rounds in flight before the engine waits for an output.
    """

    def __init__(self, scheduler: SimulatedScheduler, stages: Sequence[Stage], host: HostTimes, depth: int) -> None:
        self.scheduler, self.stages, self.host, self.depth = scheduler, stages, host, depth
        self._host_free = [0.0] * len(stages)
        self._device_free = [0.0] * len(stages)
        self._sampled: dict[int, float] = {-1: 0.0}  # round -> when the first stage has its tokens
        self._newest_output = 0.0
        self.busy = [0.0] * len(stages)

    def run(self, arrivals: Arrivals, most_rounds: int = 1_000_000) -> Run:
        """Until every request has all its tokens.

        Raises:
            RuntimeError: it does not end within `most_rounds` rounds.
        """
        now, host, scheduler = 0.0, self.host, self.scheduler
        rounds: list[SimulatedRound] = []
        queue: deque[SimulatedRound] = deque()
        most = 0
        while True:
            scheduler.add(arrivals.until(now))
            if scheduler.unfinished:
                made = scheduler.schedule()
                now += host.plan + host.plan_row * len(made.rows)
                self._dispatch(made, now)
                rounds.append(made)
                queue.append(made)
                most = max(most, len(queue))
                if len(rounds) > most_rounds:
                    raise RuntimeError(f"the simulation is not over after {most_rounds} rounds")
                if len(queue) < self.depth:
                    continue
            elif not queue:
                upcoming = arrivals.upcoming
                if upcoming is None:
                    break
                now = max(now, upcoming)
                continue
            oldest = queue.popleft()
            now = max(now, oldest.output) + host.collect + host.collect_row * len(oldest.rows)
            for _ in scheduler.update(oldest, now):
                arrivals.ended(now)
        first = min((request.arrival for request in arrivals.all), default=0.0)
        return Run(now - first + host.around, arrivals.all, rounds, self.busy, most)

    def _dispatch(self, made: SimulatedRound, now: float) -> None:
        """Work out when each stage runs a round that the engine sends at `now`."""
        host = self.host
        if not made.rows:
            # Nothing runs, but outputs are collected in order.
            made.output = self._newest_output = max(self._newest_output, now)
            return
        replayed = not made.work.prompt_tokens
        ready = self._sampled[made.needs]
        for index, (cost, layers) in enumerate(self.stages):
            begin = max(now + host.message, self._host_free[index])
            launched = begin + (host.launch if replayed else host.launch + layers * host.launch_layer)
            self._host_free[index] = launched
            start = max(begin + host.launch, self._device_free[index], ready)
            busy = cost.seconds(made.work)
            end = max(start + busy, launched)
            self.busy[index] += busy
            self._device_free[index] = end
            made.begins.append(start)
            made.ends.append(end)
            ready = end + host.hop
        # One stage alone keeps its tokens.
        self._sampled[made.number] = made.ends[-1] + (host.handoff if len(self.stages) > 1 else 0.0)
        made.output = self._newest_output = max(self._newest_output, made.ends[-1] + host.output)
