"""Point-to-point transfers between stages, the same code over NCCL and gloo.

`torch.distributed` gives both the same interface with different meanings of
`wait`: with NCCL the current stream waits and the host goes on; with gloo the
host waits, there being no stream. A transfer starts after the work already
queued on the current stream, so a receive posted at its point of use occupies
nothing before.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

import torch
import torch.distributed as dist

from vllm_handoff.executor.board import Phase
from vllm_handoff.worker import work_clock

_WAITS = {"hop": Phase.HOP, "handoff": Phase.HANDOFF}


class TransferError(RuntimeError):
    """A transfer between stages failed or did not match its manifest."""


class Peer:
    """The other end of a link: a rank of a process group that belongs to this link alone.

    Args:
        group: process group used for nothing else, so that operations on it
            pair up by order.
        rank: the peer's global rank.
        stage: the peer's stage, for error messages.
        link: what the link is for, to tell waiting times apart.
    """

    # gloo's handles learn of completion only in wait(). A receiver takes what was
    # sent within a few rounds, as manifests demand, so waiting for the send this
    # many back costs nothing; the bound keeps handles from piling up.
    MOST_UNDER_WAY = 16

    def __init__(
        self, group: dist.ProcessGroup, rank: int, stage: int, link: Literal["hop", "handoff"] = "hop"
    ) -> None:
        self.group = group
        self.rank = rank
        self.stage = stage
        self.link = link
        # A tensor must outlive its send: kept with the handle until the transfer is over.
        self._sending: deque[tuple[Any, torch.Tensor]] = deque()

    def send(self, tensor: torch.Tensor, what: str) -> Any:
        """Start sending a contiguous tensor; the returned handle's `wait` orders reuse of its memory."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        if len(self._sending) >= self.MOST_UNDER_WAY:
            with work_clock.here().waiting(Phase.SEND):
                self._sending.popleft()[0].wait()
        try:
            handle = dist.isend(tensor, dst=self.rank, group=self.group)
        except RuntimeError as error:
            raise TransferError(f"{what}: sending to stage {self.stage} failed: {error}") from error
        self._sending.append((handle, tensor))
        return handle

    def post_receive(self, tensor: torch.Tensor, what: str) -> PendingReceive:
        """Post a receive into `tensor`; nothing may read it before `wait`."""
        try:
            handle = dist.irecv(tensor, src=self.rank, group=self.group)
        except RuntimeError as error:
            raise TransferError(f"{what}: receiving from stage {self.stage} failed: {error}") from error
        return PendingReceive(handle, what, self)


class PendingReceive:
    """A posted receive."""

    def __init__(self, handle: Any, what: str, peer: Peer) -> None:
        self._handle = handle
        self._what = what
        self._peer = peer

    def wait(self) -> None:
        """Order what follows after the arrival: on the current stream (NCCL) or on the host (gloo).

        Raises:
            TransferError: the peer is gone or the transfer timed out.
        """
        try:
            with work_clock.here().waiting(_WAITS[self._peer.link]):
                self._handle.wait()
        except RuntimeError as error:
            raise TransferError(f"{self._what}: receiving from stage {self._peer.stage} failed: {error}") from error


def warm_up(group: dist.ProcessGroup, pairs: list[tuple[int, int]], device: torch.device) -> None:
    """Make every point-to-point communicator now, in one order on all ranks.

    NCCL makes them at first use, and two ranks that first use two of them in
    different orders hang. `pairs` are global ranks (sender, receiver), the
    same list on every member of the group.
    """
    me = dist.get_rank()
    token = torch.zeros(4, dtype=torch.int64, device=device)
    for sender, receiver in pairs:
        if me == sender:
            dist.send(token, dst=receiver, group=group)
        elif me == receiver:
            dist.recv(token, src=sender, group=group)
