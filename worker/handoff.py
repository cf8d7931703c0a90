"""The handoff: a round's sampled tokens, from the last stage to the stages that need them.

One packed transfer a round, on a communicator of its own. Whether it takes
place, its size and the round that applies it come from the manifest alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from vllm_handoff.scheduler_ext.manifest import HEADER_SIZE, Manifest
from vllm_handoff.worker.transfer import Peer, TransferError

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
        num_sampled: int64 [rows].
        num_rejected: int64 [rows].
    """

    idx_mapping: torch.Tensor
    sampled_tokens: torch.Tensor
    num_sampled: torch.Tensor
    num_rejected: torch.Tensor


def pack(
    manifest: Manifest,
    header: torch.Tensor,
    sampled_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
) -> torch.Tensor:
    """Pack a round's tokens into one int64 tensor of `manifest.payload_size` elements.

    Args:
        header: int64 [4] on the device, the manifest's header.
        sampled_tokens: int64 [rows, at most manifest.width].
        num_sampled, num_rejected: integer [rows].
    """
    rows, columns = sampled_tokens.shape
    if columns < manifest.width:
        sampled_tokens = torch.nn.functional.pad(sampled_tokens, (0, manifest.width - columns))
    parts = (header, num_sampled.long(), num_rejected.long(), sampled_tokens.reshape(-1))
    payload = torch.cat(parts)
    assert rows == len(manifest.rows) and payload.numel() == manifest.payload_size, (
        f"round {manifest.round}: {rows} rows x {columns} tokens do not fit its manifest"
    )
    return payload


def unpack(manifest: Manifest, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Views of a payload: sampled tokens [rows, width], numbers sampled [rows], numbers rejected [rows]."""
    rows = len(manifest.rows)
    counts = payload[HEADER_SIZE : HEADER_SIZE + 2 * rows].view(2, rows)
    tokens = payload[HEADER_SIZE + 2 * rows :].view(rows, manifest.width)
    return tokens, counts[0], counts[1]


class HeaderCheck:
    """Compares the headers of arrived handoffs with their manifests, off the critical path.

    The header is copied to the host without waiting and looked at once its
    event has fired, in a later round.
    """

    def __init__(self, device: torch.device, stage: int) -> None:
        self._cuda = device.type == "cuda"
        self._stage = stage
        self._arriving: deque[tuple[Manifest, torch.Tensor, Any]] = deque()

    def expect(self, manifest: Manifest, payload: torch.Tensor) -> None:
        """Start the check of a payload that arrived for `manifest`."""
        if not self._cuda:
            self._compare(manifest, payload[:HEADER_SIZE])
            return
        header = torch.empty(HEADER_SIZE, dtype=torch.int64, pin_memory=True)
        header.copy_(payload[:HEADER_SIZE], non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._arriving.append((manifest, header, event))

    def poll(self) -> None:
        """Look at the headers that have reached the host.

        Raises:
            HandoffMismatchError: one is not what its manifest says.
        """
        while self._arriving and self._arriving[0][2].query():
            manifest, header, _ = self._arriving.popleft()
            self._compare(manifest, header)

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

    def __init__(self, receivers: Iterable[Peer], device: torch.device) -> None:
        self._receivers = tuple(receivers)
        self._device = device

    def send(
        self, manifest: Manifest, sampled_tokens: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor
    ) -> None:
        """Send a round's tokens. Called for rounds whose manifest says so, and for no others."""
        header = torch.tensor(manifest.header, dtype=torch.int64)
        if self._device.type == "cuda":
            header = header.pin_memory().to(self._device, non_blocking=True)
        payload = pack(manifest, header, sampled_tokens, num_sampled, num_rejected)
        for peer in self._receivers:
            peer.send(payload, f"round {manifest.round}, handoff")


class _Announced(NamedTuple):
    """A handoff under way to this stage."""

    manifest: Manifest
    slots: np.ndarray  # int64 [rows], each row's request slot when its round ran here
    generations: np.ndarray  # int64 [rows], each row's generation; -1 for a row that feeds nothing


class HandoffReceiver:
    """A receiving stage's end: keeps what is under way, and applies it when a manifest needs it.

    A row is known by its slot and generation: a slot holds one life of a
    request at a time, and a generation is never used twice by one slot.

    Args:
        num_slots: request slots of this stage.
    """

    def __init__(self, sender: Peer, device: torch.device, stage: int, num_slots: int) -> None:
        self._sender = sender
        self._device = device
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
        """A round that hands off has run here; its tokens are under way.

        Args:
            slots: integer [rows], the slot of each of the manifest's rows.

        Raises:
            TransferError: this stage holds another life of a request than the manifest names.
        """
        rows = manifest.rows
        generations = np.fromiter((row.generation for row in rows), np.int64, len(rows))
        if not np.array_equal(self._generation[slots], generations):
            wrong = int(np.flatnonzero(self._generation[slots] != generations)[0])
            raise TransferError(
                f"round {manifest.round}: this stage holds generation {self._generation[slots[wrong]]} of "
                f"{rows[wrong].req_id}, the manifest names {generations[wrong]}"
            )
        if not all(row.feeds for row in rows):
            generations[[not row.feeds for row in rows]] = _NOBODY
        # Copied: the batch's own array may be a buffer that a later round fills anew.
        self._under_way.append(_Announced(manifest, slots.astype(np.int64), generations))

    def take(self, needs: Iterable[int]) -> Iterator[Sampled]:
        """Receive and yield the handoffs of the given rounds, oldest first.

        Raises:
            TransferError: the next handoff under way is another round's.
        """
        self.header_check.poll()
        for number in needs:
            if not self._under_way or self._under_way[0].manifest.round != number:
                under_way = [announced.manifest.round for announced in self._under_way]
                raise TransferError(f"the handoff of round {number} is needed next, but under way are {under_way}")
            manifest, slots, generations = self._under_way.popleft()
            payload = torch.empty(manifest.payload_size, dtype=torch.int64, device=self._device)
            self._sender.post_receive(payload, f"round {number}, handoff").wait()
            self.header_check.expect(manifest, payload)
            alive = self._generation[slots] == generations
            if alive.any():
                yield Sampled(self._to_device(np.where(alive, slots, -1)), *unpack(manifest, payload))

    def drain(self) -> None:
        """Receive and drop every handoff under way, so that the channel is empty."""
        for _ in self.take([announced.manifest.round for announced in self._under_way]):
            pass

    def _to_device(self, slots: np.ndarray) -> torch.Tensor:
        mapping = torch.from_numpy(slots)
        if self._device.type == "cuda":
            mapping = mapping.pin_memory().to(self._device, non_blocking=True)
        return mapping
