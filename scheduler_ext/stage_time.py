"""Where what the scheduler has to know of the stages' speed waits for it: it is made later in the same process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from vllm_handoff.scheduler_ext.policy import PipelineTime, StagePoint, StageTime

_TIME = "_handoff_pipeline_time"
_PACE = "_handoff_host_pace"


class Pace(Protocol):
    """The hosts' speed."""

    def seconds(self) -> float:
        """What launching a round that only decodes takes the slowest host; 0 if not known."""


def keep_stage_times(
    vllm_config: Any, ranks: Sequence[Sequence[StagePoint]], stage_size: int = 1
) -> PipelineTime | None:
    """Keep what was measured.

    Args:
        ranks: each rank's rounds.
        stage_size: ranks of a stage, which is as slow as its slowest.

    Returns:
        The stages' times, None if nothing was measured.
    """
    if not all(len({point.rows for point in points if not point.context}) >= 2 for points in ranks):
        return None
    fits = [StageTime.fit(points) for points in ranks]
    stages = [PipelineTime(tuple(fits[at : at + stage_size])).slowest for at in range(0, len(fits), stage_size)]
    time = PipelineTime(tuple(stages))
    object.__setattr__(vllm_config, _TIME, time)
    return time


def time_of(vllm_config: Any) -> PipelineTime | None:
    """What keep_stage_times kept, None if nothing was measured."""
    return getattr(vllm_config, _TIME, None)


def keep_pace(vllm_config: Any, pace: Pace) -> None:
    """Keep where the hosts' speed can be read."""
    object.__setattr__(vllm_config, _PACE, pace)


def pace_of(vllm_config: Any) -> Pace | None:
    """What keep_pace kept, None if nothing."""
    return getattr(vllm_config, _PACE, None)
