"""The simulator beside what was measured, its bound, and its command."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from vllm_handoff.executor import cli
from vllm_handoff.scheduler_ext.stage_cost import H200, RoundWork, StageCost, stage_costs
from vllm_handoff.simulator import calibration as module
from vllm_handoff.simulator.bound import bound
from vllm_handoff.simulator.calibration import Calibration, Point, even_pipeline, fit, points_of, simulate
from vllm_handoff.simulator.counts import SCENARIOS, Counts, count
from vllm_handoff.simulator.plots import LOADS, sample
from vllm_handoff.simulator.simulate import ALLOWED

CALIBRATION = Calibration.load()


@pytest.mark.parametrize("point", CALIBRATION.points, ids=lambda point: point.name)
def test_a_measured_run_is_predicted(point: Point) -> None:
    assert point.name not in CALIBRATION.exceptions, "a known exception: this test is where it would be skipped"
    seconds = simulate(point, CALIBRATION.model, CALIBRATION.constants).seconds
    assert seconds == pytest.approx(point.seconds, rel=ALLOWED)
    # The bound is one of the model's: what the model predicts can never be below it.
    costs = stage_costs(CALIBRATION.model, point.split, CALIBRATION.constants.device)
    assert bound(point.load, costs).seconds <= seconds


def test_the_plan_and_the_simulator_use_the_same_device() -> None:
    assert asdict(H200) == asdict(CALIBRATION.constants.device)


def test_the_fit_finds_constants_that_made_the_measurements() -> None:
    """Points that were simulated with other constants are fitted better by the end than at the start."""
    small = [Point("handoff", load, 1.0, (16, 16)) for load in ((1, 64, 12), (24, 64, 12), (40, 256, 8))]
    truth = module.Constants.of({**module.START, "bandwidth": 3.3e12, "decode_flops": 9e14, "admit": 0.0})
    points = [
        Point(p.engine, p.load, simulate(p, CALIBRATION.model, truth).seconds, p.split) for p in small
    ]  # fmt: skip

    def off(values: dict[str, float]) -> float:
        found = module.errors(points, CALIBRATION.model, module.Constants.of(values))
        return sum(error * error for error in found)

    assert off(fit(points, CALIBRATION.model, rounds=2)) < off(module.START) / 10


def test_two_cohorts_read_the_weights_twice() -> None:
    costs = stage_costs(CALIBRATION.model, (16, 16))
    # Few rows: one cohort is as good as two, and nothing beats its way through both stages.
    few = bound((2, 1, 101), costs)
    assert few.seconds == pytest.approx(100 * sum(c.seconds(RoundWork.decode(2, 51.5)) for c in costs), rel=0.01)
    many = bound((256, 1, 101), costs)
    slowest = max(cost.seconds(RoundWork.decode(128, 51.5)) for cost in costs)
    assert many.cohorts == 2 and many.seconds - many.prefill == pytest.approx(200 * slowest)
    assert many.seconds > bound((256, 1, 101), stage_costs(CALIBRATION.model, (32,))).seconds / 2


def test_stages_add_up_to_the_whole_model() -> None:
    work = RoundWork(rows=10, prompt_tokens=500, samples=12, context=9000, prompt_context=70_000)
    (whole,) = stage_costs(CALIBRATION.model, (32,))
    parts = stage_costs(CALIBRATION.model, (20, 12))
    assert sum(part.seconds(work) for part in parts) == pytest.approx(whole.seconds(work) + H200.stage_seconds)
    assert StageCost(CALIBRATION.model, (), H200, first=False, last=False).seconds(work) == H200.stage_seconds
    with pytest.raises(ValueError, match="not of 32 layers"):
        stage_costs(CALIBRATION.model, (16, 15))


@pytest.mark.parametrize("stages", [2, 4])
def test_ours_has_no_more_empty_rounds_than_the_depth(stages: int) -> None:
    for scenario in SCENARIOS[:2]:
        ours, theirs = (count(scenario, engine, stages, CALIBRATION) for engine in ("handoff", "mp"))
        assert ours.empty < 2 * stages
        # Until they share every round, eight requests are in as many rounds as their prompts took.
        assert ours.longest_wait <= stages
        assert theirs.empty > 100 * (stages - 1)
        assert ours.seconds <= theirs.seconds * 1.01


def test_counts_look_at_every_round() -> None:
    counts = count(SCENARIOS[0], "handoff", 2, CALIBRATION)
    assert counts == Counts(128, 3, 1.0, counts.uneven, 1, counts.seconds)
    assert counts.uneven < 0.1


def test_a_sample_for_the_pictures() -> None:
    for load in LOADS:
        few, more = (sample(load, "handoff", 4, clients, CALIBRATION) for clients in (1, 8))
        assert few.throughput < more.throughput
        assert few.middle <= more.late


def test_sixteen_stages_and_a_thousand_requests() -> None:
    from vllm_handoff.simulator.requests import Arrivals, burst

    run = even_pipeline("handoff", 16, CALIBRATION).run(Arrivals(burst(1000, 64, 4)))
    assert run.generated == 4000
    assert max(run.busy) < run.seconds


def test_the_command_prints_every_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    few = Calibration(CALIBRATION.model, CALIBRATION.points[:2], CALIBRATION.constants, {})
    monkeypatch.setattr(Calibration, "load", classmethod(lambda cls, path=None: few))
    assert cli.main(["simulate"]) == 0
    out = capsys.readouterr().out
    assert all(point.name in out for point in few.points)
    assert cli.main(["simulate", "--load", "4x16+8", "--stages", "3"]) == 0
    assert "bound" in capsys.readouterr().out
    small = ["--stages", "4", "--layers", "8", "--host-ms"]
    assert cli.main(["simulate", "--load", "64x16+30", *small, "3"]) == 0
    assert cli.main(["simulate", "--load", "64x16+30", *small, "-1"]) == 1
    assert cli.main(["simulate", "--load", "four"]) == 1
    assert cli.main(["simulate", "--counts", "0"]) == 1
    assert "REQUESTSxPROMPT+GENERATED" in capsys.readouterr().err


def test_a_prediction_that_is_off_is_an_error_unless_known(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = Point("handoff", (1, 16, 4), 10.0, (16, 16))
    for exceptions, status in (({}, 1), ({wrong.name: "why"}, 0)):
        found = Calibration(CALIBRATION.model, (wrong,), CALIBRATION.constants, exceptions)
        monkeypatch.setattr(Calibration, "load", classmethod(lambda cls, path=None, found=found: found))
        assert cli.main(["simulate"]) == status


def test_measured_runs_have_names_of_their_own() -> None:
    content = json.loads(Path(module.MEASURED).read_text())
    names = [point.name for point in points_of(content)]
    assert len(names) == len(set(names)) >= 30
