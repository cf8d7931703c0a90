"""Counts of what the executor has done, for tests, benchmarks, metrics and dashboards."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

logger = logging.getLogger(__name__)

STATS_FILE_VARIABLE = "VLLM_HANDOFF_STATS_FILE"
# Rounds in flight, and none completed for so long: a stall. A long prefill takes a second or two.
STALL_NS = 10_000_000_000


class RoundStats(msgspec.Struct):
    """Counts since the executor started. All are integers: they are put on a board (see board.py).

    Attributes:
        rounds: rounds sent to the workers.
        rounds_not_dispatched: rounds with nothing to do for any worker, answered by the executor.
        max_in_flight: the most rounds that were sent and not yet answered at once.
        handoffs: rounds whose sampled tokens are transferred.
        handoffs_not_needed: rounds with tokens whose samples no later round reads.
        tokens: tokens scheduled, over all rounds.
        completed: rounds whose output has come back.
        in_flight: rounds sent and not yet answered.
        depth: rounds that may be in flight.
        handoff_bytes: size of the handoffs, to each receiving worker.
        round_ns: time from sending to output, over all completed rounds.
        stalls: times that no round in flight completed for STALL_NS and one did in the end.
        faults: failures that ended the executor.
        progress_ns: when rounds last advanced, by the machine's monotonic clock.
        engine_ns: processor time that the engine's thread, which schedules, had used when it last sent a round.
    """

    rounds: int = 0
    rounds_not_dispatched: int = 0
    max_in_flight: int = 0
    handoffs: int = 0
    handoffs_not_needed: int = 0
    tokens: int = 0
    completed: int = 0
    in_flight: int = 0
    depth: int = 0
    handoff_bytes: int = 0
    round_ns: int = 0
    stalls: int = 0
    faults: int = 0
    progress_ns: int = 0
    engine_ns: int = 0

    def sent(self, now: int) -> None:
        """A round was sent at `now`."""
        self.rounds += 1
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        if self.in_flight == 1:
            # The pipeline was empty: what it did not do before is no lack of progress.
            self.progress_ns = now

    def answered(self, sent_ns: int, now: int) -> None:
        """The output of a round that was sent at `sent_ns` came at `now`."""
        if self.quiet_ns(now) > STALL_NS:
            self.stalls += 1
        self.completed += 1
        self.in_flight -= 1
        self.round_ns += now - sent_ns
        self.progress_ns = now

    def quiet_ns(self, now: int) -> int:
        """For how long rounds in flight have not advanced; 0 without any."""
        return max(0, now - self.progress_ns) if self.in_flight else 0


class StageProgress(msgspec.Struct):
    """What the supervisor sees of the stages between two completed rounds, every two seconds at least.

    Attributes:
        advanced_ns: when a stage was last seen to advance within rounds in flight (see stall.py), by the
            machine's monotonic clock; 0: never, or nobody looks (`stall_seconds` 0).
    """

    advanced_ns: int = 0


def write_if_asked(stats: RoundStats) -> None:
    """Write the counts as JSON to the file that VLLM_HANDOFF_STATS_FILE names, if it is set."""
    path = os.environ.get(STATS_FILE_VARIABLE)
    if path:
        partial = Path(f"{path}.partial")
        try:
            partial.write_bytes(msgspec.json.encode(stats) + b"\n")
            partial.replace(path)
        except OSError as error:
            # An engine that has done its work does not fail for want of a few bytes.
            logger.error("The counts cannot be written to %s (%s=%s): %s", path, STATS_FILE_VARIABLE, path, error)
