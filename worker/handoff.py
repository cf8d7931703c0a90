"""The handoff: a round's sampled tokens, from the last stage to the stages that need them.

One packed transfer a round, on a communicator of its own. Whether it takes
place, its size and the round that applies it come from the manifest alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_handoff.scheduler_ext.manifest import HEADER_SIZE, Manifest
from vllm_handoff.worker.host_arrays import HostArrays
from vllm_handoff.worker.streams import current_stream
from vllm_handoff.worker.transfer import MOST_UNDER_WAY, Handle, Link, TransferError

# Generations that no request has: of a free slot, and of a row that nobody will read.
_FREE = -1
_NOBODY = -2


class HandoffMismatchError(TransferError):
    """A handoff arrived that is not the one its manifest announced."""


class Sampled(NamedTuple):
    """A round's sampled tokens, as the model runner's post-processing takes them.

    Attributes:
        idx_mapping: int64 [rows], the request slot of each row, -1 for a row to be dropped.
        sampled_tokens: int64 [rows, width].
        num_sampled: int32 [rows].
        num_rejected: int32 [rows].
    """

    idx_mapping: torch.Tensor
    sampled_tokens: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor


class Drafts(NamedTuple):
    """Tokens that the last stage proposes for the next round of each request.

    Attributes:
        slots: int64 [rows], request slots. Rows to be dropped are replaced by
            repetitions of one that is not, so that the shape is that of the round.
        tokens: int64 [rows, width - 1], of those slots.
    """

    slots: torch.Tensor
    tokens: torch.Tensor


def pack(
    manifest: Manifest,
    header: torch.Tensor,
    sampled_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    drafts: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pack a round's tokens into one int32 tensor of `manifest.payload_size` elements.

    Tokens lie in it as they are, int64. All parts in one dtype make this one
    kernel; of mixed dtypes PyTorch would copy each part by itself.

    Args:
        header: int64 [4] that the device reads, the manifest's header.
        sampled_tokens: int64 [rows, at most manifest.width].
        num_sampled, num_rejected: integer [rows].
        drafts: int64 [rows, manifest.width - 1], if the width is above 1.
    """
    rows, columns = sampled_tokens.shape
    if columns < manifest.width:
        sampled_tokens = torch.nn.functional.pad(sampled_tokens, (0, manifest.width - columns))
    parts = [header.view(torch.int32), sampled_tokens.reshape(-1).view(torch.int32)]
    if drafts is not None:
        parts.append(drafts.reshape(-1).view(torch.int32))
    payload = torch.cat([*parts, num_sampled.to(torch.int32), num_rejected.to(torch.int32)])
    assert rows == len(manifest.rows) and payload.numel() == manifest.payload_size, (
        f"round {manifest.round}: {rows} rows x {columns} tokens of {sampled_tokens.dtype} do not fit its manifest"
    )
    return payload


def unpack(manifest: Manifest, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of a payload: tokens [rows, width], numbers sampled and rejected [rows], drafts [rows, width - 1]."""
    rows, width = len(manifest.rows), manifest.width
    sizes = (2 * HEADER_SIZE, 2 * rows * width, 2 * rows * (width - 1), rows, rows)
    _, tokens, drafts, num_sampled, num_rejected = payload.split(sizes)
    return (
        tokens.view(torch.int64).view(rows, width),
        num_sampled,
        num_rejected,
        drafts.view(torch.int64).view(rows, width - 1),
    )


class _Arriving(NamedTuple):
    """A header on its way to the host."""

    manifest: Manifest
    header: torch.Tensor  # int32 [8], pinned
    event: torch.cuda.Event


class HeaderCheck:
    """Compares the headers of arrived handoffs with their manifests, off the critical path.

    The header is copied to the host without waiting and looked at once its
    event has fired, in a later round.
    """

    def __init__(self, device: torch.device, stage: int) -> None:
        self._cuda = device.type == "cuda"
        self._device = device
        self._stage = stage
        self._arriving: deque[_Arriving] = deque()
        self._free: list[tuple[torch.Tensor, torch.cuda.Event]] = []
        if self._cuda:
            pinned = torch.empty(MOST_UNDER_WAY, 2 * HEADER_SIZE, dtype=torch.int32, pin_memory=True)
            self._free = [(header, torch.cuda.Event()) for header in pinned]

    def expect(self, manifest: Manifest, payload: torch.Tensor) -> None:
        """Start the check of a payload that arrived for `manifest`."""
        if not self._cuda:
            self._compare(manifest, payload[: 2 * HEADER_SIZE].view(torch.int64))
            return
        if not self._free:
            # The host is this many handoffs ahead of the device, more than a scheduler lets it be.
            self._arriving[0].event.synchronize()
            self.poll()
        header, event = self._free.pop()
        header.copy_(payload[: 2 * HEADER_SIZE], non_blocking=True)
        event.record(current_stream(self._device))
        self._arriving.append(_Arriving(manifest, header, event))

    def poll(self) -> None:
        """Look at the headers that have reached the host.

        Raises:
            HandoffMismatchError: one is not what its manifest says.
        """
        while self._arriving and self._arriving[0].event.query():
            manifest, header, event = self._arriving.popleft()
            self._compare(manifest, header.view(torch.int64))
            self._free.append((header, event))

    def _compare(self, manifest: Manifest, header: torch.Tensor) -> None:
        found = tuple(header.tolist())
        if found != manifest.header:
            raise HandoffMismatchError(
                f"stage {self._stage} expected the handoff of round {manifest.round} "
                f"({len(manifest.rows)} rows, width {manifest.width}) and received that of round {found[1]} "
                f"({found[2]} rows, width {found[3]}; magic {'right' if found[0] == manifest.header[0] else 'wrong'}). "
                "The stages disagree on the schedule; the engine must be restarted."
            )


class HandoffSender:
    """The last stage's end: one packed payload to every receiving stage."""

    def __init__(self, receivers: Iterable[Link], device: torch.device) -> None:
        self._receivers = tuple(receivers)
        # A link lets no more sends than that be under way, so what comes round again has been read.
        self._headers = HostArrays(HEADER_SIZE, MOST_UNDER_WAY + 2, device)

    def send(
        self,
        manifest: Manifest,
        sampled_tokens: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        drafts: torch.Tensor | None = None,
    ) -> None:
        """Send a round's tokens. Called for rounds whose manifest says so, and for no others."""
        payload = pack(manifest, self._headers.put(manifest.header), sampled_tokens, num_sampled, num_rejected, drafts)
        for peer in self._receivers:
            peer.send(payload, f"round {manifest.round}, handoff")


class _Announced(NamedTuple):
    """A handoff under way to this stage."""

    manifest: Manifest
    payload: torch.Tensor
    receive: Handle
    slots: np.ndarray  # int64 [rows], each row's request slot when its round ran here
    generations: np.ndarray  # int64 [rows], each row's generation; -1 for a row that feeds nothing


class HandoffReceiver:
    """A receiving stage's end: keeps what is under way, and applies it when a manifest needs it.

    A row is known by its slot and generation: a slot holds one life of a
    request at a time, and a generation is never used twice by one slot.

    Args:
        num_slots: request slots of this stage.
    """

    def __init__(self, sender: Link, device: torch.device, stage: int, num_slots: int) -> None:
        self._sender = sender
        self._device = device
        # The header check lets no more handoffs than that be ahead of the device, so what comes round again was read.
        self._mappings = HostArrays(num_slots, MOST_UNDER_WAY + 2, device)
        # Of drafts: slots, and rows of the payload.
        self._draft_slots = HostArrays(num_slots, MOST_UNDER_WAY + 2, device)
        self._draft_rows = HostArrays(num_slots, MOST_UNDER_WAY + 2, device)
        self._generation = np.full(num_slots, _FREE, dtype=np.int64)
        self._under_way: deque[_Announced] = deque()
        self.header_check = HeaderCheck(device, stage)

    def admit(self, slots: Sequence[int], generation: int) -> None:
        """Requests that a round handed to this stage begin a life in these slots."""
        self._generation[slots] = generation

    def forget(self, slot: int) -> None:
        """The request in a slot left this stage: rows of it that are still under way will be dropped."""
        self._generation[slot] = _FREE

    def announce(self, manifest: Manifest, slots: np.ndarray) -> None:
        """A round that hands off has run here; its tokens are under way, and their receive is posted.

        Args:
            slots: integer [rows], the slot of each of the manifest's rows.

        Raises:
            TransferError: this stage holds another life of a request than the manifest names.
        """
        rows = manifest.rows
        generations = np.array(rows.generations, np.int64)
        differ = self._generation[slots] != generations
        if differ.any():
            wrong = int(np.flatnonzero(differ)[0])
            raise TransferError(
                f"round {manifest.round}: this stage holds generation {self._generation[slots[wrong]]} of "
                f"{rows.req_ids[wrong]}, the manifest names {generations[wrong]}"
            )
        if rows.unread:
            generations[list(rows.unread)] = _NOBODY
        payload = torch.empty(manifest.payload_size, dtype=torch.int32, device=self._device)
        # Posted in its own round, though it is waited for in a later one: the last stage's send needs
        # nothing of this stage but this round, so neither can wait for what the other has yet to launch.
        receive = self._sender.post_receive(payload, f"round {manifest.round}, handoff")
        # Copied: the batch's own array may be a buffer that a later round fills anew.
        self._under_way.append(_Announced(manifest, payload, receive, slots.astype(np.int64), generations))

    def take(self, needs: Iterable[int]) -> Iterator[tuple[Sampled, Drafts | None]]:
        """Wait for the handoffs of the given rounds and yield them, oldest first.

        Drafts come with them if the manifest's width is above 1.

        Raises:
            TransferError: the next handoff under way is another round's.
        """
        self.header_check.poll()
        for number in needs:
            if not self._under_way or self._under_way[0].manifest.round != number:
                under_way = [announced.manifest.round for announced in self._under_way]
                raise TransferError(f"the handoff of round {number} is needed next, but under way are {under_way}")
            manifest, payload, receive, slots, generations = self._under_way.popleft()
            receive.wait()
            self.header_check.expect(manifest, payload)
            alive = self._generation[slots] == generations
            if alive.any():
                mapping = self._mappings.put(np.where(alive, slots, -1))
                *sampled, drafts = unpack(manifest, payload)
                yield Sampled(mapping, *sampled), self._drafts(slots, alive, drafts) if manifest.width > 1 else None

    def _drafts(self, slots: np.ndarray, alive: np.ndarray, drafts: torch.Tensor) -> Drafts:
        rows = np.arange(len(slots))
        if not alive.all():
            # A selection of rows by a mask would make the host wait for the device to count them.
            rows = np.where(alive, rows, int(np.flatnonzero(alive)[0]))
            drafts = drafts[self._draft_rows.put(rows)]
        return Drafts(self._draft_slots.put(slots[rows]), drafts)

    def drain(self) -> None:
        """Receive and drop every handoff under way, so that the channel is empty."""
        for _ in self.take([announced.manifest.round for announced in self._under_way]):
            pass
