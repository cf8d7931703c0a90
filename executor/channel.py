"""The executor's end of the control plane: two sockets in a private folder.

Commands leave through one ROUTER and reports arrive at another, so that each
socket has one user at a time: whoever sends holds the send lock, whoever waits
for a reply holds the receiving role (see calls.py). zmq sockets do not allow
two threads at once, not even one that sends and one that polls.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import cast

import zmq

from vllm_handoff.executor import messages
from vllm_handoff.executor.descriptors import require_descriptors
from vllm_handoff.executor.errors import ProtocolError
from vllm_handoff.executor.folder import ControlFolder
from vllm_handoff.executor.messages import Frame, Hello, Report, Welcome

logger = logging.getLogger(__name__)

_HELLO_BYTES = 4096
_SHARE_ABOVE = 64 << 10
# Counted, with some to spare: zmq's threads and sockets, and a worker's process and three connections.
DESCRIPTORS = 24
DESCRIPTORS_A_WORKER = 6


class ControlChannel:
    """Sends commands to workers by rank and receives proved workers' reports.

    Must be made after the workers were forked: a zmq context does not survive a
    fork, and its descriptors would leak into the workers. Workers that connect
    earlier simply retry until the sockets are bound.
    """

    def __init__(self, folder: ControlFolder, world_size: int) -> None:
        self._token = folder.token
        self._world_size = world_size
        self._command_peers: dict[int, bytes] = {}
        self._report_peers: dict[bytes, int] = {}
        self._refused: set[bytes] = set()
        require_descriptors(DESCRIPTORS + DESCRIPTORS_A_WORKER * world_size, "the control plane")
        self._context = zmq.Context()
        self.commands = self._bind(folder.endpoint("commands"), _HELLO_BYTES)
        self.reports = self._bind(folder.endpoint("reports"), messages.MAX_PAYLOAD_BYTES)

    def _bind(self, endpoint: str, max_message: int) -> zmq.Socket:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.LINGER, 0)
        # No high-water mark: depth bounds what is in flight, and a ROUTER drops what exceeds the mark.
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0 if max_message > _HELLO_BYTES else 64)
        socket.setsockopt(zmq.MAXMSGSIZE, max_message)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.bind(endpoint)
        return socket

    def send(self, ranks: Iterable[int], header: bytes, payload: bytes | zmq.Frame | None = None) -> None:
        """Send one command to each of `ranks`. The caller holds the send lock.

        Raises:
            zmq.ZMQError: EHOSTUNREACH if a worker's connection is gone.
        """
        # Plain sends: send_multipart checks every frame first, which costs a fifth of this.
        send = self.commands.send
        if payload is not None and len(payload) > _SHARE_ABOVE:
            # One copy that all workers' sends share. (None at all would cost a
            # garbage-collecting thread of pyzmq's.)
            payload = zmq.Frame(payload, copy=True)
        for rank in ranks:
            send(self._command_peers[rank], zmq.SNDMORE)
            if payload is None:
                send(header)
            else:
                send(header, zmq.SNDMORE)
                send(payload)

    def welcome_workers(self) -> None:
        """Take the Hellos that wait on the command link and answer the proved ones. Start only."""
        while _has_message(self.commands):
            peer, *frames = self.commands.recv_multipart(zmq.NOBLOCK)
            rank = self._check_hello(peer, frames, "commands")
            if rank is not None and rank not in self._command_peers:
                self._command_peers[rank] = peer
                welcome = Welcome(messages.proof(self._token, "executor", rank, "commands"))
                self.commands.send_multipart([peer, messages.encode(welcome)])

    def receive(self) -> list[tuple[int, Report, Frame | None]]:
        """All reports of proved workers that have arrived, as (rank, report, payload); never blocks.

        Raises:
            ProtocolError: a proved worker sent something malformed.
        """
        received: list[tuple[int, Report, Frame | None]] = []
        while _has_message(self.reports):
            peer, *frames = self.reports.recv_multipart(zmq.NOBLOCK)
            rank = self._report_peers.get(peer)
            if rank is None:
                rank = self._check_hello(peer, frames, "reports")
                if rank is not None:
                    self._report_peers[peer] = rank
                continue
            try:
                received.append((rank, *messages.decode_report(frames)))
            except ProtocolError as error:
                raise ProtocolError(f"rank {rank}: {error}") from error
        return received

    def _check_hello(self, peer: bytes, frames: Sequence[Frame], link: messages.LinkName) -> int | None:
        """The rank that a first message proves, or None."""
        try:
            return check_hello(frames, self._token, self._world_size, link).rank
        except ProtocolError as error:
            if peer not in self._refused and len(self._refused) < 64:
                self._refused.add(peer)
                logger.warning("Control plane: a stranger on the %s socket is ignored: %s.", link, error)
            return None

    def close(self) -> None:
        self._context.destroy(linger=0)


def check_hello(frames: Sequence[Frame], token: bytes, world_size: int, link: messages.LinkName) -> Hello:
    """The Hello that a peer's first message is. A payload is never opened.

    Raises:
        ProtocolError: it is not one of a worker of this executor on this link.
    """
    if len(frames) != 1 or len(frames[0]) > _HELLO_BYTES:
        raise ProtocolError("its first message is not a Hello")
    hello, _ = messages.decode_report(frames)
    if not isinstance(hello, Hello) or hello.link != link or hello.rank >= world_size:
        raise ProtocolError("its first message is not a Hello for this link")
    if not messages.is_proof(hello.proof, token, "worker", hello.rank, link):
        raise ProtocolError("its proof is wrong")
    return hello


def _has_message(socket: zmq.Socket) -> bool:
    """Whether a receive would succeed; cheaper than the exception of one that does not."""
    return bool(cast(int, socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
