"""Where the stage times measured at start wait for the scheduler, which is made later in the same process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_handoff.scheduler_ext.policy import StageTime

_ATTRIBUTE = "_handoff_stage_time"


def keep_stage_times(vllm_config: Any, stages: Sequence[Sequence[tuple[int, float]]]) -> StageTime | None:
    """Keep what each stage measured, as (rows, seconds) points; the slowest stage sets the pace.

    Returns:
        The fitted time of the slowest stage, None if nothing was measured.
    """
    fits = [StageTime.fit(points) for points in stages if len({rows for rows, _ in points}) >= 2]
    if not fits:
        return None
    most = max(rows for points in stages for rows, _ in points)
    slowest = max(fits, key=lambda fit: fit.of(most))
    object.__setattr__(vllm_config, _ATTRIBUTE, slowest)
    return slowest


def stage_time_of(vllm_config: Any) -> StageTime | None:
    """What keep_stage_times kept, None if nothing was measured."""
    return getattr(vllm_config, _ATTRIBUTE, None)
