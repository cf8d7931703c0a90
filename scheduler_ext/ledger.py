"""The scheduler's account of handoffs: which are under way, and which a round needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from vllm_handoff.scheduler_ext.manifest import Manifest, Row


class ScheduledRow(NamedTuple):
    """What the scheduler knows of one request of the round it has just planned."""

    req_id: str
    admitted: bool  # this round hands the request to the workers (new, or resumed after preemption)
    samples: bool  # the round produces a token for it (False: an unfinished prefill chunk)
    feeds: bool  # a later round may read that token


class HandoffLedger:
    """Numbers rounds, gives requests their generations and pairs every handoff with the round that applies it.

    Handoffs travel on one ordered channel, so they are applied in the order of
    their rounds: needing round k means needing every handoff before it too. A
    handoff that nobody needs any more is applied `lag` rounds later all the
    same, since its sender cannot know that.

    Args:
        stages: number of pipeline stages; with 1 there is nothing to hand off.
        width: token columns of a handoff row.
        lag: a round applies the handoffs of rounds up to `lag` before it even
            if it needs none of them. The last stage is then done with them in
            steady state, so that applying costs no waiting.
    """

    def __init__(self, stages: int, width: int = 1, lag: int | None = None) -> None:
        self.stages = stages
        self.width = width
        self.lag = stages if lag is None else lag
        self.next_round = 0
        self._pending: deque[int] = deque()  # rounds whose handoff no manifest has named yet
        self._generation: dict[str, int] = {}  # of the requests that workers know
        self._last_sample: dict[str, tuple[int, bool]] = {}  # req_id -> (round of its newest sample, feeds)

    @property
    def pending(self) -> tuple[int, ...]:
        """Rounds whose handoff is under way, oldest first."""
        return tuple(self._pending)

    def generation(self, req_id: str) -> int | None:
        """The request's generation, or None if the workers do not know the request."""
        return self._generation.get(req_id)

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drop requests that left the workers (finished, aborted or preempted)."""
        for req_id in req_ids:
            self._generation.pop(req_id, None)
            self._last_sample.pop(req_id, None)

    def open_round(self, rows: Sequence[ScheduledRow], num_tokens: int) -> Manifest:
        """The manifest of the next round that has tokens. `rows` is in batch order.

        Raises:
            AssertionError: a request decodes although its newest sample was
                declared to feed nobody, or is unknown to the workers.
        """
        number = self._take_number()
        through = number - self.lag
        for row in rows:
            if row.admitted:
                self._generation[row.req_id] = number
                self._last_sample.pop(row.req_id, None)
                continue
            assert row.req_id in self._generation, f"round {number}: {row.req_id} was never admitted to the workers"
            if self.stages == 1:
                continue  # no token travels, so whether one was declared the last is nobody's concern
            newest = self._last_sample.get(row.req_id)
            if newest is not None:
                assert newest[1], (
                    f"round {number}: {row.req_id} decodes, but its sample of round {newest[0]} was declared the last"
                )
                through = max(through, newest[0])
        needs = self._needs(through)

        handoff = self.stages > 1 and any(row.feeds for row in rows)
        for row in rows:
            if row.samples:
                self._last_sample[row.req_id] = (number, row.feeds)
        if handoff:
            self._pending.append(number)
        return Manifest(
            round=number,
            num_tokens=num_tokens,
            width=self.width,
            rows=tuple(Row(row.req_id, self._generation[row.req_id], row.feeds) for row in rows) if handoff else (),
            needs=needs,
        )

    def open_empty_round(self, *, drain: bool, dispatch: bool) -> Manifest:
        """The manifest of the next round that has no tokens.

        Args:
            drain: apply every handoff that is still under way: the engine goes
                idle and no later round would come to do it.
            dispatch: the workers must see the round for another reason.
        """
        number = self._take_number()
        needs = self._needs(number - 1) if drain else ()
        return Manifest(round=number, num_tokens=0, width=self.width, needs=needs, dispatch=dispatch or bool(needs))

    def _take_number(self) -> int:
        number = self.next_round
        self.next_round += 1
        return number

    def _needs(self, through: int) -> tuple[int, ...]:
        needs = []
        while self._pending and self._pending[0] <= through:
            needs.append(self._pending.popleft())
        return tuple(needs)


def batch_order(
    num_scheduled_tokens: Mapping[str, int], drafts: Mapping[str, Sequence[int]], decode_query_len: int
) -> list[str]:
    """Request ids in the order in which vLLM's V2 model runner lays out a batch.

    Requests with drafts lead, then those with exactly `decode_query_len`
    tokens, then the rest by length; ties keep the scheduler's order. The model
    runner checks the order against its own batch in every round that hands
    off, and a test compares it with vLLM's function.
    """
    if not drafts and len(set(num_scheduled_tokens.values())) == 1:
        return list(num_scheduled_tokens)  # as most rounds are: all alike
    return sorted(
        num_scheduled_tokens,
        key=lambda r: (not drafts.get(r), num_scheduled_tokens[r] != decode_query_len, num_scheduled_tokens[r]),
    )
