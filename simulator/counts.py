"""How many rounds a load takes and how full they are, with vLLM's policy and with ours: no device needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vllm_handoff.simulator.calibration import Calibration, even_pipeline
from vllm_handoff.simulator.pipeline import Run
from vllm_handoff.simulator.requests import Arrivals, SimulatedRequest, burst, draining, poisson


class Scenario(NamedTuple):
    """A load with a name, made anew for each run."""

    name: str
    make: Callable[[], list[SimulatedRequest]]


SCENARIOS = (
    Scenario("one request, 128 + 128", lambda: burst(1, 128, 128)),
    Scenario("eight requests, 128 + 128", lambda: burst(8, 128, 128)),
    Scenario("burst of 256, 32 + 256", lambda: burst(256, 32, 256)),
    Scenario("burst of 256 draining to 3, 32 + 64 / 256", lambda: draining(256, 3, 32, 64, 256)),
    Scenario("400 at random, 20 a second, 32..1024 + 32..256", lambda: poisson(400, 20.0, (32, 1024), (32, 256))),
)


class Counts(NamedTuple):
    """What a run's rounds were like.

    Attributes:
        rounds: with work.
        empty: without any: they hold a place among the rounds in flight all the same.
        rows: mean decoding rows of rounds that had any.
        uneven: mean difference of decoding rows between neighbouring rounds without prefill, empty ones included.
        longest_wait: most rounds from one that yields a token of a request to the next that does.
        seconds: of the whole run.
    """

    rounds: int
    empty: int
    rows: float
    uneven: float
    longest_wait: int
    seconds: float

    @classmethod
    def of(cls, run: Run) -> Counts:
        """Counted over a whole run."""
        full = [made for made in run.rounds if made.rows]
        decoding = [made.decodes for made in full if made.decodes]
        uneven = [
            abs(a.decodes - b.decodes)
            for a, b in zip(run.rounds, run.rounds[1:])
            if not (a.work.prompt_tokens or b.work.prompt_tokens)
        ]
        return cls(
            rounds=len(full),
            empty=len(run.rounds) - len(full),
            rows=sum(decoding) / max(1, len(decoding)),
            uneven=sum(uneven) / max(1, len(uneven)),
            longest_wait=max(request.longest_wait for request in run.requests),
            seconds=run.seconds,
        )


def count(scenario: Scenario, engine: str, stages: int, calibration: Calibration) -> Counts:
    """Run a scenario with one engine's policy."""
    return Counts.of(even_pipeline(engine, stages, calibration).run(Arrivals(scenario.make())))


def count_all(stages: int, calibration: Calibration) -> list[tuple[str, str, Counts]]:
    """(load, policy, counts) of all scenarios, vLLM's policy before ours."""
    return [
        (scenario.name, name, count(scenario, engine, stages, calibration))
        for scenario in SCENARIOS
        for engine, name in (("mp", "vLLM"), ("handoff", "ours"))
    ]


def table(stages: int, counted: list[tuple[str, str, Counts]]) -> str:
    """The same as a table in Markdown."""
    lines = [
        f"| load (PP={stages}) | policy | rounds | empty | rows a round | differ by | longest wait | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for load, policy, found in counted:
        lines.append(
            f"| {load if policy == 'vLLM' else ''} | {policy} | {found.rounds} | {found.empty} "
            f"| {found.rows:.1f} | {found.uneven:.1f} | {found.longest_wait} | {found.seconds:.2f} |"
        )
    return "\n".join(lines)
