"""The scheduler's account of handoffs: which are under way, and which a round needs."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

from vllm_handoff.scheduler_ext.manifest import Manifest, Rows

_NO_SAMPLE = -1


class _Known:
    """A request that the workers know: its generation, the round of its newest sample and whether that is read."""

    __slots__ = ("feeds", "generation", "newest")

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.newest = _NO_SAMPLE
        self.feeds = True


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
        self._known: dict[str, _Known] = {}

    @property
    def pending(self) -> tuple[int, ...]:
        """Rounds whose handoff is under way, oldest first."""
        return tuple(self._pending)

    def generation(self, req_id: str) -> int | None:
        """The request's generation, or None if the workers do not know the request."""
        known = self._known.get(req_id)
        return None if known is None else known.generation

    def forget(self, req_ids: Iterable[str]) -> None:
        """Drop requests that left the workers (finished, aborted or preempted)."""
        for req_id in req_ids:
            self._known.pop(req_id, None)

    def open_round(
        self,
        req_ids: Sequence[str],
        num_tokens: int,
        *,
        admitted: Iterable[str] = (),
        chunks: Collection[str] = (),
        last: Collection[str] = (),
    ) -> Manifest:
        """The manifest of the next round that has tokens. Runs once a round over all its requests, so it is kept short.

        Args:
            req_ids: the round's requests in batch order.
            num_tokens: of all of them.
            admitted: those that the round hands to the workers (new, or resumed after preemption).
            chunks: those for which it produces no token: an unfinished prefill chunk.
            last: those whose token no later round may read.

        Raises:
            AssertionError: a request decodes although its newest sample was
                declared to feed nobody, or is unknown to the workers.
        """
        number = self._take_number()
        known = self._known
        for req_id in admitted:
            known[req_id] = _Known(number)
        through, generations, unread = number - self.lag, [], []
        for req_id in req_ids:
            one = known.get(req_id)
            assert one is not None, f"round {number}: {req_id} was never admitted to the workers"
            generations.append(one.generation)
            if one.newest > through:
                through = one.newest
            # With one stage no token travels, so whether one was declared the last is nobody's concern.
            assert one.feeds or self.stages == 1, (
                f"round {number}: {req_id} decodes, but its sample of round {one.newest} was declared the last"
            )
            if req_id in chunks:
                unread.append(len(generations) - 1)
                continue
            one.newest = number
            if req_id in last:
                one.feeds = False
                unread.append(len(generations) - 1)
            else:
                one.feeds = True
        needs = self._needs(through)
        handoff = self.stages > 1 and len(unread) < len(req_ids)
        if handoff:
            self._pending.append(number)
        rows = Rows(tuple(req_ids), tuple(generations), tuple(unread)) if handoff else Rows()
        return Manifest(round=number, num_tokens=num_tokens, width=self.width, rows=rows, needs=needs)

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
