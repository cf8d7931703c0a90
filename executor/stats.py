"""Counts of what the executor has done, for tests, benchmarks and dashboards."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

STATS_FILE_VARIABLE = "VLLM_HANDOFF_STATS_FILE"


class RoundStats(msgspec.Struct):
    """Counts since the executor started.

    Attributes:
        rounds: rounds sent to the workers.
        rounds_not_dispatched: rounds with nothing to do for any worker, answered by the executor.
        max_in_flight: the most rounds that were sent and not yet answered at once.
        handoffs: rounds whose sampled tokens are transferred.
        handoffs_not_needed: rounds with tokens whose samples no later round reads.
        tokens: tokens scheduled, over all rounds.
    """

    rounds: int = 0
    rounds_not_dispatched: int = 0
    max_in_flight: int = 0
    handoffs: int = 0
    handoffs_not_needed: int = 0
    tokens: int = 0


def write_if_asked(stats: RoundStats) -> None:
    """Write the counts as JSON to the file that VLLM_HANDOFF_STATS_FILE names, if it is set."""
    path = os.environ.get(STATS_FILE_VARIABLE)
    if path:
        partial = Path(f"{path}.partial")
        partial.write_bytes(msgspec.json.encode(stats) + b"\n")
        partial.replace(path)
