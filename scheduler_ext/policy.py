"""The microbatch policy: which decoding requests share a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# Requests are spread over several rounds once that shortens their trip by this share.
# Below it, twice as many rounds cost the engine more than they save the devices.
WORTHWHILE = 0.05
# The same for a round more, of those that are spread.
TELLING = 0.01
# Few requests come together after this many trips without prefill. Sooner costs online loads up to a tenth of their
# throughput at two stages (simulated): the next prompt's prefill then delays all of them at once. A burst loses 0.5%.
QUIET_TRIPS = 16

# Rows by which stages are compared.
_MANY = 256


class StagePoint(NamedTuple):
    """A decoding round that was measured on one stage.

    Attributes:
        rows: decoding requests.
        context: tokens that each attends to.
        seconds: what it took.
    """

    rows: int
    context: int
    seconds: float


class StageTime(NamedTuple):
    """A stage's time for a decoding round, modelled as base + per_row x rows + per_context x context, in seconds.

    The base is reading the weights; it does not shrink when a round is split.
    The context is the tokens that all rows together attend to.
    """

    base: float
    per_row: float
    per_context: float = 0.0

    @classmethod
    def fit(cls, points: Sequence[StagePoint]) -> StageTime:
        """The least-squares line through rounds without context, no part below zero, and what context costs.

        The latter is what rounds with more and with less context differ by: both may hold something that those
        without do not.

        Raises:
            ValueError: fewer than two different numbers of rows.
        """
        plain = [(rows, seconds) for rows, context, seconds in points if not context]
        if len({rows for rows, _ in plain}) < 2:
            raise ValueError(f"a line needs two different numbers of rows, got {points}")
        mean_x = sum(rows for rows, _ in plain) / len(plain)
        mean_y = sum(seconds for _, seconds in plain) / len(plain)
        slope = sum((rows - mean_x) * (seconds - mean_y) for rows, seconds in plain)
        slope /= sum((rows - mean_x) ** 2 for rows, _ in plain)
        slope = max(0.0, slope)
        line = cls(max(0.0, mean_y - slope * mean_x), slope)
        return line._replace(per_context=_per_context([point for point in points if point.context]))

    def of(self, rows: float, context: float = 0.0) -> float:
        """Seconds for a round of `rows`, each with `context` tokens of context."""
        return self.base + (self.per_row + self.per_context * context) * rows

    @property
    def weight_rows(self) -> float | None:
        """Rows that take as long as reading the weights, None if rows were found to cost nothing."""
        return self.base / self.per_row if self.per_row > 0 else None


def _per_context(points: Sequence[StagePoint]) -> float:
    if len({point.context for point in points}) < 2:
        return 0.0
    less, more = min(points, key=lambda p: p.context), max(points, key=lambda p: p.context)
    return max(0.0, (more.seconds - less.seconds) / (more.rows * more.context - less.rows * less.context))


class PipelineTime(NamedTuple):
    """The stages' times, first to last."""

    stages: tuple[StageTime, ...]

    @property
    def slowest(self) -> StageTime:
        """The stage that sets the pace of many requests."""
        return max(self.stages, key=lambda stage: stage.of(_MANY))

    def trip(self, live: int, parts: int, context: float = 0.0, host: float = 0.0) -> float:
        """Seconds in which each of `live` requests gets a token when they are spread over `parts` rounds.

        A round passes all stages before the next of the same requests can
        begin. Meanwhile every stage computes the rounds of all the others, one
        after the other, and every host launches them.

        Args:
            context: tokens of context of a request.
            host: seconds that a round takes the slowest host, whatever it holds.
        """
        times = [stage.of(live / parts, context) for stage in self.stages]
        return max(sum(times), parts * max(times), parts * host)

    def parts(self, live: int, context: float = 0.0, host: float = 0.0) -> int:
        """Over how many rounds, at most as many as stages, to spread `live` requests; see `trip`."""
        best, least = 1, self.trip(live, 1, context, host)
        for parts in range(2, min(len(self.stages), live) + 1):
            seconds = self.trip(live, parts, context, host)
            if seconds <= (1 - (WORTHWHILE if best == 1 else TELLING)) * least:
                best, least = parts, seconds
        return best


class EvenRounds:
    """Caps the decoding rows of a round so that requests spread evenly over up to as many rounds as there are stages.

    The cap follows the number of requests that decode now, not a configured
    maximum, so it neither under-fills at low load nor lets a burst that was
    admitted together decode in one round for ever. A request waits for its
    place at most `stages` rounds: those that have waited longest go first.

    Args:
        stages: pipeline stages.
        split_from: live decoding requests from which they are spread over `stages` rounds; None: `time` decides.
        time: of the stages; None: unless `split_from` says so, nothing is spread.

    Attributes:
        host_seconds: what a round takes the slowest host, 0 as long as it is not known.
        context: tokens of context of a decoding request, on average.
    """

    def __init__(self, stages: int, split_from: int | None, time: PipelineTime | None = None) -> None:
        self.stages = stages
        self.split_from = split_from
        self.time = time
        self.host_seconds = 0.0
        self.context = 0.0
        self._asked: tuple[int, float, float] | None = None
        self._parts = 1
        self._newest_prefill = 0

    def parts(self, live: int) -> int:
        """Over how many rounds `live` decoding requests are spread."""
        if self.stages == 1:
            return 1
        if self.split_from is not None:
            return self.stages if live >= self.split_from else 1
        if self.time is None:
            return 1
        # Asked several times a round.
        asked = live, self.context, self.host_seconds
        if asked != self._asked:
            self._asked, self._parts = asked, self.time.parts(*asked)
        return self._parts

    def spreads_from(self, most: int) -> int | None:
        """The smallest number of requests, up to `most`, that are spread over several rounds; None if there is none."""
        return next((live for live in range(2, most + 1) if self.parts(live) > 1), None)

    def lead(self, live: int, turn: int, prefill_is_due: bool) -> int:
        """How many rounds earlier than after a whole trip a request takes part in round `turn`. Ask for every round.

        Requests that are spread over fewer rounds than there are stages come
        round the sooner; all of them in every round, if they are not spread at
        all. While prompts arrive they stay in the rounds in which they are: a
        round with prefill takes long, and makes wait whoever is in it, or needs
        a token of it.
        """
        if prefill_is_due:
            self._newest_prefill = turn
        quiet = turn - self._newest_prefill > QUIET_TRIPS * self.stages
        return self.stages - self.parts(live) if quiet else 0

    def cap(self, live: int, turn: int) -> int:
        """Most decoding rows of round number `turn` while `live` requests decode.

        Over as many rounds in a row as they are spread over, the caps add up to
        `live` and differ by at most one. One cap for all, rounded up, would
        leave the last of them with what remains: 3, 3, 3 and 1 of ten.
        """
        parts = self.parts(live)
        place = turn % parts
        share = (place + 1) * live // parts - place * live // parts
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
