"""The microbatch policy: which decoding requests share a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Rounds are split once that shortens a round's stage time by this share. Below
# it, twice as many rounds cost the host more than they save the devices.
WORTHWHILE = 0.05
# Few requests come together after this many trips without prefill. Sooner costs online loads up to a tenth of their
# throughput at two stages (simulated): the next prompt's prefill then delays all of them at once. A burst loses 0.5%.
QUIET_TRIPS = 16


class StageTime(NamedTuple):
    """A stage's time for a decoding round, modelled as base + per_row x rows, in seconds.

    The base is reading the weights; it does not shrink when a round is split.
    """

    base: float
    per_row: float

    @classmethod
    def fit(cls, points: Sequence[tuple[int, float]]) -> StageTime:
        """The least-squares line through (rows, seconds), neither part below zero.

        Raises:
            ValueError: fewer than two different numbers of rows.
        """
        if len({rows for rows, _ in points}) < 2:
            raise ValueError(f"a line needs two different numbers of rows, got {points}")
        mean_x = sum(rows for rows, _ in points) / len(points)
        mean_y = sum(seconds for _, seconds in points) / len(points)
        slope = sum((rows - mean_x) * (seconds - mean_y) for rows, seconds in points)
        slope /= sum((rows - mean_x) ** 2 for rows, _ in points)
        slope = max(0.0, slope)
        return cls(max(0.0, mean_y - slope * mean_x), slope)

    def of(self, rows: float) -> float:
        """Seconds for a round of `rows`."""
        return self.base + self.per_row * rows

    @property
    def weight_rows(self) -> float | None:
        """Rows that take as long as reading the weights, None if rows were found to cost nothing."""
        return self.base / self.per_row if self.per_row > 0 else None

    def split_from(self, parts: int) -> int | None:
        """The smallest number of rows whose split into `parts` rounds is worthwhile, None if no number is.

        A trip through the pipeline takes `parts` times a stage's time, split or
        not (unsplit, all stages but one idle), so what counts is how much
        shorter the stage's time becomes.
        """
        share = (1 - 1 / parts) - WORTHWHILE
        if parts < 2 or self.per_row <= 0 or share <= 0:
            return None
        return max(2, int(WORTHWHILE * self.base / (self.per_row * share)) + 1)


class EvenRounds:
    """Caps the decoding rows of a round so that requests spread evenly over as many rounds as there are stages.

    The cap follows the number of requests that decode now, not a configured
    maximum, so it neither under-fills at low load nor lets a burst that was
    admitted together decode in one round for ever. A request waits for its
    place at most `stages` rounds: those that have waited longest go first.

    Args:
        stages: pipeline stages.
        split_from: live decoding requests from which rounds are split; None: never.
    """

    def __init__(self, stages: int, split_from: int | None) -> None:
        self.stages = stages
        self.split_from = split_from
        self._newest_prefill = 0

    def gathers(self, live: int, turn: int, prefill_is_due: bool) -> bool:
        """Whether round number `turn` takes all `live` decoding requests, whatever is in flight. Ask for every round.

        Fewer requests than are worth a split come together, since each round
        costs the host and reads the weights. While prompts arrive they stay in
        the rounds in which they are: a round with prefill takes long, and makes
        wait whoever is in it, or needs a token of it.
        """
        if prefill_is_due:
            self._newest_prefill = turn
        return not self.splits(live) and turn - self._newest_prefill > QUIET_TRIPS * self.stages

    def splits(self, live: int) -> bool:
        """Whether `live` decoding requests are spread over several rounds."""
        return self.stages > 1 and self.split_from is not None and live >= self.split_from

    def cap(self, live: int, turn: int) -> int:
        """Most decoding rows of round number `turn` while `live` requests decode.

        Over as many rounds in a row as there are stages the caps add up to
        `live` and differ by at most one. One cap for all, rounded up, would
        leave the last of them with what remains: 3, 3, 3 and 1 of ten.
        """
        if not self.splits(live):
            return live
        place = turn % self.stages
        share = (place + 1) * live // self.stages - place * live // self.stages
        return max(1, share)

    def hold_back(self, ready: Sequence[tuple[int, str]], live: int, turn: int) -> list[str]:
        """Requests that must wait for the next round.

        Args:
            ready: (round from which it was eligible, request id) of every
                decoding request that this round could take.
            live: requests that decode now, whether or not this round could take them;
                those whose last token is under way too.
            turn: number of the round.
        """
        excess = len(ready) - self.cap(live, turn)
        if excess <= 0:
            return []
        # Stable: among equals the scheduler's own order decides.
        longest_first = sorted(ready, key=lambda entry: entry[0])
        return [req_id for _, req_id in longest_first[-excess:]]
