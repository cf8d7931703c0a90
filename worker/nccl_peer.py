"""A link over NCCL itself, without PyTorch's process groups.

PyTorch's point-to-point calls cost the host 40 to 90 us each (measured: a
Python stack is gathered, a work object made and tracked, for every one), as
much as a tenth of a decoding round. Here a transfer is one NCCL call and two
events. NCCL is called through the bindings that vLLM has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators.pynccl_wrapper import (
    NCCLLibrary,
    buffer_type,
    cudaStream_t,
    ncclDataTypeEnum,
)
from vllm.logger import init_logger

from vllm_handoff.worker.rendezvous import (
    CudaStreamMemory,
    Rendezvous,
    RendezvousError,
    SharedPage,
    probe,
)
from vllm_handoff.worker.streams import current_stream
from vllm_handoff.worker.transfer import MOST_UNDER_WAY, Link, TransferError

logger = init_logger(__name__)

_ID_BYTES = 128
_PATH_BYTES = 128
# Before default-priority work, and in hardware queues apart from it.
_HIGH_PRIORITY = -1


class NcclPeer:
    """The other end of a link: a communicator of two ranks that carries this link's transfers and nothing else.

    Args:
        communicator: NCCL's handle.
        other: the peer's rank in it.
        stage: the peer's stage, for error messages.
        rendezvous: lets both ends meet before each transfer; None: NCCL's kernels wait for each other.
    """

    def __init__(
        self,
        nccl: NCCLLibrary,
        communicator: Any,
        other: int,
        stage: int,
        device: torch.device,
        rendezvous: Rendezvous | None,
    ) -> None:
        self._nccl = nccl
        self._communicator = communicator
        self._other = other
        self.stage = stage
        self._device = device
        self._rendezvous = rendezvous
        # Transfers have a stream of their own: a send must not hold up the next round's work
        # until its receiver comes, nor a receive what is computed before it is needed.
        self._stream = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)
        self._ready = torch.cuda.Event()
        self._sending: deque[tuple[NcclTransfer, torch.Tensor]] = deque()

    @property
    def description(self) -> str:
        return "NCCL" if self._rendezvous is None else "NCCL, ends meeting by flags in host memory"

    def send(self, tensor: torch.Tensor, what: str) -> NcclTransfer:
        """Start sending a contiguous tensor once the current stream's work so far is done; see transfer.Link."""
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()
        if len(self._sending) >= MOST_UNDER_WAY:
            # Never so in a running engine: a receiver takes what was sent within a few rounds.
            self._sending.popleft()[0].synchronize()
        handle = self._start(self._nccl.ncclSend, tensor, f"{what}: sending to")
        self._sending.append((handle, tensor))
        return handle

    def post_receive(self, tensor: torch.Tensor, what: str) -> NcclTransfer | NcclReceive:
        """A receive into `tensor`, after the current stream's work so far.

        With a rendezvous it is put into its stream at once, where it waits for
        the sender and occupies nothing. Posting it in the round that its sender
        sends it in is what keeps hosts from waiting for each other in a circle:
        see rendezvous.py. Without one it would be a kernel that spins, and
        starts where the current stream is when `wait` is called.
        """
        if self._rendezvous is None:
            return NcclReceive(self, tensor, what)
        return self._start(self._nccl.ncclRecv, tensor, f"{what}: receiving from")

    def receive(self, tensor: torch.Tensor, what: str) -> None:
        """Receive into a contiguous tensor, in order with the current stream's other work."""
        self._transfer(self._nccl.ncclRecv, tensor, current_stream(self._device), f"{what}: receiving from")

    def _start(self, operation: Any, tensor: torch.Tensor, what: str) -> NcclTransfer:
        """Put a transfer into this link's stream, after the current stream's work so far."""
        self._ready.record(current_stream(self._device))
        self._stream.wait_event(self._ready)
        self._transfer(operation, tensor, self._stream, what)
        handle = NcclTransfer(self._device)
        handle.event.record(self._stream)
        return handle

    def _transfer(self, operation: Any, tensor: torch.Tensor, stream: torch.cuda.Stream, what: str) -> None:
        assert tensor.is_contiguous() and tensor.device == self._device, f"{what} stage {self.stage}: {tensor.shape}"
        raw = stream.cuda_stream
        try:
            if self._rendezvous is not None:
                self._rendezvous.meet(raw)
            operation(
                buffer_type(tensor.data_ptr()),
                tensor.numel() * tensor.element_size(),
                ncclDataTypeEnum.ncclInt8,
                self._other,
                self._communicator,
                cudaStream_t(raw),
            )
        except RuntimeError as error:
            raise TransferError(f"{what} stage {self.stage} failed: {error}") from error


class NcclTransfer:
    """A transfer in its link's stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.event = torch.cuda.Event()

    def wait(self) -> None:
        """Let the current stream wait for the transfer: the tensor may be overwritten, or read, after that."""
        self.event.wait(current_stream(self._device))

    def is_completed(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        self.event.synchronize()


class NcclReceive:
    """A receive that has yet to be put into a stream."""

    def __init__(self, peer: NcclPeer, tensor: torch.Tensor, what: str) -> None:
        self._peer, self._tensor, self._what = peer, tensor, what

    def wait(self) -> None:
        """Receive, in order with the current stream's other work; the host goes on."""
        self._peer.receive(self._tensor, self._what)


def connect(
    pairs: Mapping[str, Sequence[tuple[int, int]]],
    group: dist.ProcessGroup,
    device: torch.device,
    meet: bool,
) -> dict[tuple[str, int, int], Link]:
    """Make this rank's links over NCCL. Collective over `group`, with the same arguments on every rank.

    Args:
        pairs: by what the links are for, each link's (sender, receiver): ranks within `group`, which are stages.
        group: a group of the stages' ranks that works on host memory.
        meet: use rendezvous where every rank can.

    Returns:
        (name, sender, receiver) to link, of those that this rank is an end of.

    Raises:
        RuntimeError: NCCL's, when a communicator cannot be made.
    """
    me = dist.get_rank(group)
    nccl = NCCLLibrary()
    made = {}
    for name, sender, receiver in [(name, *pair) for name, some in pairs.items() for pair in some]:
        identity = torch.zeros(_ID_BYTES, dtype=torch.uint8)
        if me == sender:
            identity = torch.frombuffer(bytearray(bytes(nccl.ncclGetUniqueId().internal)), dtype=torch.uint8)
        dist.broadcast(identity, group_src=sender, group=group)
        rendezvous = _rendezvous(sender, receiver, me, group, device) if meet else None
        if me not in (sender, receiver):
            continue
        with torch.cuda.device(device):
            unique_id = nccl.unique_id_from_bytes(identity.numpy().tobytes())
            communicator = nccl.ncclCommInitRank(2, unique_id, int(me == receiver))
        other = receiver if me == sender else sender
        made[name, sender, receiver] = NcclPeer(nccl, communicator, int(me == sender), other, device, rendezvous)
    # NCCL connects at first use; in one order on all ranks, since it waits for the peer.
    token = torch.zeros(4, dtype=torch.int64, device=device)
    for (_, sender, _), peer in made.items():
        if me == sender:
            peer.send(token, "start").wait()
        else:
            peer.receive(token, "start")
        torch.cuda.synchronize(device)
    return dict(made)


def _rendezvous(
    sender: int, receiver: int, me: int, group: dist.ProcessGroup, device: torch.device
) -> Rendezvous | None:
    """The two ends' rendezvous, or None on both if either cannot. Collective over `group`."""
    path = torch.zeros(_PATH_BYTES, dtype=torch.uint8)
    page, made, able = None, None, 1
    try:
        if me == sender:
            page = SharedPage.create()
            text = page.path.encode()
            path[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    except OSError as error:
        able = _unable(error)
    dist.broadcast(path, group_src=sender, group=group)
    if me in (sender, receiver) and able:
        try:
            if page is None:
                page = SharedPage.open(path.numpy().tobytes().rstrip(b"\0").decode())
            driver = CudaStreamMemory()
            with torch.cuda.device(device):
                base = page.register(driver)
                probe(driver, base, torch.cuda.current_stream(device).cuda_stream)
                torch.cuda.synchronize(device)
            made = Rendezvous(driver, base, int(me == receiver))
            _KEPT.append(page)
        except (OSError, AttributeError, RendezvousError) as error:
            able = _unable(error)
    everyone = torch.tensor([able])
    dist.all_reduce(everyone, dist.ReduceOp.MIN, group=group)
    if page is not None:
        page.forget_path()
    return made if everyone.item() else None


# A page must stay mapped as long as streams may look at it: for the life of the process.
_KEPT: list[SharedPage] = []


def _unable(error: Exception) -> int:
    logger.warning(
        "Transfers will not wait for their peers by flags in memory (%s): NCCL's kernels wait instead, "
        "which gives the same results and occupies a little of the GPU meanwhile.",
        error,
    )
    return 0
