"""The manifest: what every stage must know of a round before it starts.

The scheduler makes it once; it travels with the round; every stage obeys it and
derives none of it again. So two stages can never disagree on whether, with
whom, or in which shape a transfer takes place.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

# The attribute of vLLM's SchedulerOutput that carries the manifest between the
# scheduler and the executor, which live in one process. On the wire the
# manifest is a typed field of its own.
_ATTRIBUTE = "handoff_manifest"

# The header of a handoff: magic, round, rows, width.
HEADER_MAGIC = 0x48414E44_4F464621
HEADER_SIZE = 4


class Row(NamedTuple):
    """A request's place in a round's batch.

    `generation` is the round that admitted the request to the workers: it
    changes when a request is preempted and resumed, and when an id is used
    again, so (req_id, generation) never names two lives of a request.
    """

    req_id: str
    generation: int
    # False for an unfinished prefill chunk and for a first sample that already
    # reaches the request's length cap: no later round reads this row's sample.
    feeds: bool


class Rows(msgspec.Struct, frozen=True, array_like=True):
    """The rows of a round in batch order, in columns: an object a row would cost every process of the engine.

    Attributes:
        req_ids: of each row.
        generations: of each row.
        unread: positions of the rows that feed no later round, in order; mostly none.
    """

    req_ids: tuple[str, ...] = ()
    generations: tuple[int, ...] = ()
    unread: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.generations) != len(self.req_ids):
            raise ValueError(f"{len(self.req_ids)} rows cannot have {len(self.generations)} generations")
        unread = self.unread
        if unread and (any(a >= b for a, b in pairwise(unread)) or unread[0] < 0 or unread[-1] >= len(self.req_ids)):
            raise ValueError(f"unread rows must be some of {len(self.req_ids)}, in order, got {unread}")

    @classmethod
    def of(cls, *rows: Row) -> Rows:
        return cls(
            tuple(row.req_id for row in rows),
            tuple(row.generation for row in rows),
            tuple(index for index, row in enumerate(rows) if not row.feeds),
        )

    def __len__(self) -> int:
        return len(self.req_ids)

    def __iter__(self) -> Iterator[Row]:
        unread = set(self.unread)
        for index, (req_id, generation) in enumerate(zip(self.req_ids, self.generations, strict=True)):
            yield Row(req_id, generation, index not in unread)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One round's agreement between all stages.

    Attributes:
        round: the round's number, counted from 0 by the scheduler.
        num_tokens: rows of hidden states that cross each stage boundary;
            0 means that nothing crosses and nobody receives.
        width: token columns of a handoff row (1, or 1 + drafts); with drafts,
            as many draft columns less one follow. Fixed by configuration, so
            sender and receiver can never count differently.
        rows: the round's requests in batch order, if it hands off; else empty.
        needs: rounds, oldest first, whose handoffs a receiving stage must have
            applied before it builds this round's inputs. Over all rounds, every
            round that hands off is named exactly once and in order, so sends
            and receives pair up whatever happens to the requests.
        dispatch: whether the round goes to the workers at all.
    """

    round: int
    num_tokens: int
    width: int = 1
    rows: Rows = Rows()
    needs: tuple[int, ...] = ()
    dispatch: bool = True

    def __post_init__(self) -> None:
        if self.round < 0 or self.num_tokens < 0 or self.width < 1:
            raise ValueError(f"round {self.round}: counts in a manifest cannot be negative, nor its width below 1")
        if self.rows and not self.num_tokens:
            raise ValueError(f"round {self.round}: a round without tokens cannot hand off")
        if self.rows and len(self.rows.unread) == len(self.rows):
            raise ValueError(f"round {self.round}: a handoff needs at least one row that feeds a later round")
        if any(a >= b for a, b in pairwise(self.needs)) or any(n >= self.round for n in self.needs):
            raise ValueError(f"round {self.round}: needs must name earlier rounds in order, got {self.needs}")
        if not self.dispatch and (self.num_tokens or self.needs):
            raise ValueError(f"round {self.round}: a round with tokens or needs must be dispatched")

    @property
    def handoff(self) -> bool:
        """Whether this round's sampled tokens are transferred at all."""
        return bool(self.rows)

    @property
    def only_decodes(self) -> bool:
        """Whether every row has one token, and its drafts. Some rounds with a short prompt look the same."""
        return 0 < self.num_tokens <= len(self.rows) * self.width

    @property
    def header(self) -> tuple[int, int, int, int]:
        """What the payload of this round's handoff starts with."""
        return HEADER_MAGIC, self.round, len(self.rows), self.width

    @property
    def payload_size(self) -> int:
        """int32 elements of the packed handoff: the header (int64), then of all rows `width` tokens and `width` - 1
        draft tokens for the next round (int64), the numbers of tokens sampled, and those rejected (int32)."""
        return 2 * HEADER_SIZE + len(self.rows) * 4 * self.width

    @property
    def payload_bytes(self) -> int:
        """Bytes of the packed handoff."""
        return 4 * self.payload_size


def attach(scheduler_output: Any, manifest: Manifest) -> None:
    """Make `manifest` the manifest of a vLLM SchedulerOutput."""
    setattr(scheduler_output, _ATTRIBUTE, manifest)


def manifest_of(scheduler_output: Any) -> Manifest | None:
    """The manifest attached to a SchedulerOutput, or None if its scheduler made none."""
    return getattr(scheduler_output, _ATTRIBUTE, None)


def detach(scheduler_output: Any) -> Manifest | None:
    """Take the manifest off a SchedulerOutput, so that it is not pickled along with it."""
    return scheduler_output.__dict__.pop(_ATTRIBUTE, None)
