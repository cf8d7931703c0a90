"""How near a measured run is to the least time in which any schedule could serve its load with these stages.

The stages' times come from recordings on the very machine: one more run of each load.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_handoff.benchmarks.loads import Load
from vllm_handoff.simulator.bound import bound
from vllm_handoff.simulator.measured_cost import MeasuredCost, points_of


def write_recording(folder: Path, engine: str, load: str, ranks: Sequence[Any]) -> None:
    """Write a recording for `vllm-handoff timeline`."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{engine}-{load}.json"
    target.write_text(json.dumps({"title": f"{engine}, {load}", "stages": ranks}))


def add_bounds(
    rows: Sequence[dict[str, Any]], recordings: Mapping[str, Sequence[Any]], stages: int
) -> list[dict[str, float]]:
    """Note each recorded load's bound in its row.

    Args:
        rows: of the table, one a load.
        recordings: by load, the recorded rounds of each rank.
        stages: pipeline stages; the first rank of each stands for it.

    Returns:
        The stages' times, as coefficients (measured_cost.MeasuredCost).
    """
    if not recordings:
        return []
    ranks = len(next(iter(recordings.values())))
    costs = [
        MeasuredCost.fit([point for recorded in recordings.values() for point in points_of(recorded[rank])])
        for rank in range(0, ranks, ranks // stages)
    ]
    for row in rows:
        if row["load"] in recordings:
            load = Load.parse(row["load"])
            found = bound((load.requests, load.prompt, load.generated), costs)
            row["bound"], row["cohorts"] = found.seconds, found.cohorts
    return [asdict(cost) for cost in costs]
