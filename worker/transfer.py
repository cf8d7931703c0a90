"""Point-to-point transfers between stages: what a link is, and links over PyTorch's process groups.

On a CPU the groups are gloo's, and the host waits, there being no stream. On
NVIDIA GPUs links go to NCCL directly (nccl_peer.py), and streams wait. A
transfer starts after the work already queued on the current stream.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist

from vllm_handoff.executor.board import Phase
from vllm_handoff.worker import work_clock

_WAITS = {"hop": Phase.HOP, "handoff": Phase.HANDOFF}

# Sends of one link that may be under way at once. A receiver takes what was sent
# within a few rounds, as manifests demand, so this bound is never felt; it keeps
# handles and memory from piling up.
MOST_UNDER_WAY = 16


class TransferError(RuntimeError):
    """A transfer between stages failed or did not match its manifest."""


class Handle(Protocol):
    """A transfer that has been asked for."""

    def wait(self) -> None:
        """Order what follows after the transfer: on the current stream where there is one, else on the host."""


class Link(Protocol):
    """One end of a link between two stages, which carries transfers in one direction, in order."""

    @property
    def description(self) -> str:
        """What carries the transfers, for the log."""

    def send(self, tensor: torch.Tensor, what: str) -> Handle:
        """Start sending a contiguous tensor, after the work already queued on the current stream.

        The tensor is kept alive; who wants to overwrite its memory waits for the handle.

        Raises:
            TransferError: naming `what`.
        """

    def post_receive(self, tensor: torch.Tensor, what: str) -> Handle:
        """A receive into a contiguous tensor; nothing may read it before the handle's `wait`.

        Raises:
            TransferError: naming `what`, here or in the handle's `wait`.
        """


class Peer:
    """A link's other end as a rank of a process group that belongs to this link alone.

    Args:
        group: process group used for nothing else, so that operations on it
            pair up by order.
        rank: the peer's global rank.
        stage: the peer's stage, for error messages.
        link: what the link is for, to tell waiting times apart.
    """

    def __init__(
        self, group: dist.ProcessGroup, rank: int, stage: int, link: Literal["hop", "handoff"] = "hop"
    ) -> None:
        self.group = group
        self.rank = rank
        self.stage = stage
        self.link = link
        # A tensor must outlive its send: kept with the handle until the transfer is over.
        self._sending: deque[tuple[_Send, torch.Tensor]] = deque()

    @property
    def description(self) -> str:
        return str(dist.get_backend(self.group))

    def send(self, tensor: torch.Tensor, what: str) -> _Send:
        """Start sending a contiguous tensor; the returned handle's `wait` orders reuse of its memory."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        if len(self._sending) >= MOST_UNDER_WAY:
            # gloo's handles learn of completion only in wait().
            self._sending.popleft()[0].wait()
        try:
            handle = _Send(dist.isend(tensor, dst=self.rank, group=self.group))
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


class _Send:
    """A send under way."""

    def __init__(self, work: Any) -> None:
        self._work = work
        self._waited = False

    def wait(self) -> None:
        # gloo counts completions: a second wait for the same send would take another's, or never end.
        if not self._waited:
            with work_clock.here().waiting(Phase.SEND):
                self._work.wait()
            self._waited = True

    def is_completed(self) -> bool:
        return self._waited or bool(self._work.is_completed())


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
