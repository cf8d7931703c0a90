"""The simulator's constants: what was measured, and the fit that turns it into constants.

measured.json holds runs on H200s, and constants fitted to them. The fit starts
from the data sheet and common sense (START), and moves each constant by a
factor. It minimises the squared relative errors of all predictions, plus a
small price for every constant that leaves its start: many loads do not depend
on some constants, and then the start decides. Nothing is tuned load by load,
and the result does not depend on who runs it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from vllm_handoff.scheduler_ext.model_shape import ModelShape
from vllm_handoff.scheduler_ext.policy import PipelineTime, StagePoint, StageTime
from vllm_handoff.scheduler_ext.prefill_chunks import PrefillChunks
from vllm_handoff.scheduler_ext.settings import ROUNDS_AHEAD
from vllm_handoff.scheduler_ext.stage_cost import Device, RoundWork, StageCost, stage_costs
from vllm_handoff.simulator.pipeline import HostTimes, Run, SimulatedPipeline, Stage
from vllm_handoff.simulator.requests import Arrivals, burst
from vllm_handoff.simulator.scheduling import EvenScheduler, Limits, SimulatedScheduler

MEASURED = Path(__file__).with_name("measured.json")

# Where the fit begins. Bandwidths and operations a second are what H200s achieve of their data sheet; host times are
# what Python and CUDA launches usually take.
START: dict[str, float] = {
    "bandwidth": 4.0e12, "kv_bandwidth": 3.5e12, "decode_flops": 6.5e14, "prefill_flops": 6.5e14,
    "layer_seconds": 45e-6, "stage_seconds": 1e-4, "sampler_passes": 6.0,
    "plan": 3e-4, "plan_row": 3e-6, "collect": 2e-4, "collect_row": 4e-6, "message": 1e-4, "launch": 1e-4,
    "launch_layer": 2e-4, "hop": 2e-5, "handoff": 2e-5, "output": 1e-4, "admit": 4e-5, "around": 3e-3,
    "mp_hop": 6e-5, "mp_handoff": 6e-5,
}  # fmt: skip
# A constant that is e times its start costs as much as a prediction that is 5% off.
PRICE = 0.05


@dataclass(frozen=True)
class Point:
    """One measured run.

    Attributes:
        engine: "mp" for vLLM's own executor, "handoff" for ours.
        load: (requests, prompt tokens, generated tokens), all at once.
        seconds: measured, a median or the only run.
        split: layers of each stage; one entry for PP=1.
        chunk: max_num_batched_tokens.
        depth: rounds in flight.
        split_from: of ours, decoding requests from which rounds are split; None: never.
        gather: of ours, whether fewer requests than that share every round.
    """

    engine: str
    load: tuple[int, int, int]
    seconds: float
    split: tuple[int, ...]
    chunk: int = 8192
    depth: int = 4
    split_from: int | None = 30
    gather: bool = False

    @property
    def name(self) -> str:
        """Such as `handoff 17/15 chunk 2048 64x512+128`."""
        what = f"{self.engine} PP={len(self.split)}"
        if len(set(self.split)) > 1:
            what += " " + "/".join(map(str, self.split))
        if self.chunk != 8192:
            what += f" chunk {self.chunk}"
        if self.engine == "handoff" and self.split_from is None:
            what += " unsplit"
        return f"{what} {self.load[0]}x{self.load[1]}+{self.load[2]}"


@dataclass(frozen=True)
class Constants:
    """A device, and the hosts' times with vLLM's executor and with ours."""

    device: Device
    host: HostTimes
    mp_hop: float
    mp_handoff: float

    @classmethod
    def of(cls, values: Mapping[str, float]) -> Constants:
        """From numbers by name, as START has them."""
        device = Device(**{field.name: values[field.name] for field in fields(Device)})
        host = HostTimes(**{field.name: values[field.name] for field in fields(HostTimes)})
        return cls(device, host, values["mp_hop"], values["mp_handoff"])

    def host_of(self, engine: str) -> HostTimes:
        """The hosts' times with an engine."""
        if engine == "mp":
            return HostTimes(**{**asdict(self.host), "hop": self.mp_hop, "handoff": self.mp_handoff})
        return self.host


@dataclass(frozen=True)
class Calibration:
    """measured.json.

    Attributes:
        model: what ran.
        points: what was measured.
        constants: what was fitted.
        exceptions: names of points whose prediction is known to be off by more than 10%, with the reason.
    """

    model: ModelShape
    points: tuple[Point, ...]
    constants: Constants
    exceptions: Mapping[str, str]

    @classmethod
    def load(cls, path: Path = MEASURED) -> Calibration:
        """From a file."""
        content = json.loads(path.read_text())
        return cls(
            ModelShape.of(content["model"]),
            points_of(content),
            Constants.of(content["constants"]),
            content.get("exceptions", {}),
        )


def points_of(content: Mapping[str, Any]) -> tuple[Point, ...]:
    """The measured runs in a file's content: groups of settings, each with its loads and their seconds."""
    points = []
    for group in content["measured"]:
        settings = {key: value for key, value in group.items() if key not in ("seconds", "from", "split")}
        for load, seconds in group["seconds"].items():
            requests, prompt, generated = (int(part) for part in load.replace("+", "x").split("x"))
            points.append(
                Point(load=(requests, prompt, generated), seconds=seconds, split=tuple(group["split"]), **settings)
            )
    return tuple(points)


def simulate(point: Point, model: ModelShape, constants: Constants) -> Run:
    """Run a measured load through the simulator."""
    costs = stage_costs(model, point.split, constants.device)
    stages = [Stage(cost, layers) for cost, layers in zip(costs, point.split, strict=True)]
    limits = Limits(tokens=point.chunk)
    scheduler = (
        SimulatedScheduler(len(stages), limits)
        if point.engine == "mp"
        else EvenScheduler(len(stages), limits, point.split_from, point.gather)
    )
    host = constants.host_of(point.engine)
    arrivals = Arrivals(burst(*point.load, apart=host.admit))
    return SimulatedPipeline(scheduler, stages, host, point.depth).run(arrivals)


def errors(points: Sequence[Point], model: ModelShape, constants: Constants) -> list[float]:
    """Of each point, prediction over measurement less one."""
    return [simulate(point, model, constants).seconds / point.seconds - 1 for point in points]


def fit(points: Sequence[Point], model: ModelShape, rounds: int = 6) -> dict[str, float]:
    """The constants that fit best: damped Gauss-Newton steps on the logarithms of the constants."""
    import numpy as np

    names = list(START)

    def values(logs: Any) -> dict[str, float]:
        return {name: START[name] * math.exp(log) for name, log in zip(names, logs, strict=True)}

    def residuals(logs: Any) -> Any:
        found = errors(points, model, Constants.of(values(logs)))
        return np.array([*found, *(PRICE * logs)])

    logs = np.zeros(len(names))
    now, damping = residuals(logs), 1e-3
    for _ in range(rounds):
        # Who shares a round can flip with the smallest change of a constant: 3% steps look past that.
        slopes = np.stack([(residuals(logs + step) - now) / 0.03 for step in 0.03 * np.eye(len(names))], axis=1)
        for _ in range(6):
            normal = slopes.T @ slopes + damping * np.eye(len(names))
            trial = logs - np.linalg.solve(normal, slopes.T @ now)
            after = residuals(trial)
            if after @ after < now @ now:
                logs, now, damping = trial, after, damping / 3
                break
            damping *= 5
    return {name: float(f"{value:.4g}") for name, value in values(logs).items()}


def even_pipeline(
    engine: str,
    stages: int,
    calibration: Calibration,
    requests: int = 512,
    layers: int | None = None,
    launch: float | None = None,
) -> SimulatedPipeline:
    """A pipeline beyond what was measured.

    Args:
        engine: "mp": vLLM's policy and depth, with our transfers, so that the policy alone differs; "handoff": ours.
        stages: pipeline stages.
        calibration: whose device, hosts and layers.
        requests: running at once (max_num_seqs).
        layers: of every stage; None: as many as on one of two stages of the model.
        launch: seconds that a round of decodes takes a stage's host; None: as fitted to runs in which that is hidden.
    """
    each = layers or len(calibration.model.layers) // 2
    host = calibration.constants.host if launch is None else replace(calibration.constants.host, launch=launch)
    model = replace(calibration.model, layers=calibration.model.layers[:1] * (each * stages))
    costs = stage_costs(model, [each] * stages, calibration.constants.device)
    limits = Limits(requests=requests)
    scheduler: SimulatedScheduler
    if engine == "mp":
        scheduler, depth = SimulatedScheduler(stages, limits), stages + 1
    else:
        slowest = max(costs, key=lambda cost: cost.base)
        chunks = PrefillChunks(stages, limits.tokens, slowest.base / slowest.per_prompt_token)
        scheduler = EvenScheduler(stages, limits, None, chunks=chunks, time=pipeline_time(costs))
        scheduler.policy.host_seconds = host.launch
        depth = stages + ROUNDS_AHEAD
    pipeline_stages = [Stage(cost, each) for cost in costs]
    return SimulatedPipeline(scheduler, pipeline_stages, host, depth)


def pipeline_time(costs: Sequence[StageCost]) -> PipelineTime:
    """The stages' times for decoding rounds, as an engine measures them at start."""
    shapes = ((1, 0), (32, 0), (64, 0), (128, 0), (256, 0), (64, 16), (64, 1024))
    measured = [[StagePoint(*shape, cost.seconds(RoundWork.decode(*shape))) for shape in shapes] for cost in costs]
    return PipelineTime(tuple(map(StageTime.fit, measured)))
