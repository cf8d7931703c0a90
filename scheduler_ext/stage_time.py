"""Where what the scheduler has to know of the stages' speed waits for it: it is made later in the same process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from vllm_handoff.scheduler_ext.policy import StageTime

_STAGE_TIME = "_handoff_stage_time"
_PACE = "_handoff_host_pace"


class Pace(Protocol):
    """The hosts' speed."""

    def seconds(self) -> float:
        """What launching a round that only decodes takes the slowest host; 0 if not known."""


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
    object.__setattr__(vllm_config, _STAGE_TIME, slowest)
    return slowest


def stage_time_of(vllm_config: Any) -> StageTime | None:
    """What keep_stage_times kept, None if nothing was measured."""
    return getattr(vllm_config, _STAGE_TIME, None)


def keep_pace(vllm_config: Any, pace: Pace) -> None:
    """Keep where the hosts' speed can be read."""
    object.__setattr__(vllm_config, _PACE, pace)


def pace_of(vllm_config: Any) -> Pace | None:
    """What keep_pace kept, None if nothing."""
    return getattr(vllm_config, _PACE, None)
