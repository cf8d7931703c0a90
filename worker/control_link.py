"""A worker's end of the control plane: commands in, reports out."""

from __future__ import annotations

import zmq

from vllm_handoff.executor import messages
from vllm_handoff.executor.descriptors import require_descriptors
from vllm_handoff.executor.errors import ProtocolError
from vllm_handoff.executor.messages import Command, Frame, Hello, Report, Welcome
from vllm_handoff.executor.shared_payload import SharedPayloadReader

# Counted, with some to spare: three contexts of zmq's, each with two threads and a socket.
WORKER_DESCRIPTORS = 40


class ReportSocket:
    """A socket for reports, used by one thread. Its first message proves the worker.

    It has a context of its own, so that the thread can wait until its last
    report has left whatever the other threads' sockets are doing.
    """

    def __init__(self, rank: int, endpoint: str, token: bytes) -> None:
        self._context = zmq.Context()
        self._socket = _connect(self._context, endpoint, messages.MAX_PAYLOAD_BYTES)
        _say_hello(self._socket, rank, "reports", token)

    def send(self, report: Report, payload: bytes | None = None) -> None:
        header = messages.encode(report)
        if payload is None:
            self._socket.send(header)
        else:
            self._socket.send_multipart([header, payload])

    def close(self, linger_s: float) -> None:
        """Close after at most `linger_s` seconds of sending what is queued."""
        self._context.destroy(linger=int(linger_s * 1000))


class ControlLink:
    """One worker's sockets. `receive` and `reports` belong to the main thread."""

    def __init__(self, rank: int, folder: str, token: bytes) -> None:
        self.rank = rank
        self._folder = folder
        self._token = token
        require_descriptors(WORKER_DESCRIPTORS, "a worker's control plane")
        self._context = zmq.Context()
        self._commands = _connect(self._context, f"ipc://{folder}/commands", messages.MAX_PAYLOAD_BYTES)
        self.reports = self.report_socket()
        self.shared = SharedPayloadReader(folder)

    def report_socket(self) -> ReportSocket:
        """A further report socket, for another thread of this worker."""
        return ReportSocket(self.rank, f"ipc://{self._folder}/reports", self._token)

    def meet_executor(self) -> None:
        """Prove this worker and check that the executor proves itself. Blocks until it answers.

        Raises:
            ProtocolError: whoever owns the socket is not the executor.
        """
        _say_hello(self._commands, self.rank, "commands", self._token)
        welcome, _ = messages.decode_command(self._commands.recv_multipart())
        if not isinstance(welcome, Welcome) or not messages.is_proof(
            welcome.proof, self._token, "executor", self.rank, "commands"
        ):
            raise ProtocolError(f"Rank {self.rank}: the command socket's owner does not prove to be the executor.")

    def has_command(self) -> bool:
        """Whether `receive` would return at once."""
        return bool(self._commands.poll(0))

    def receive(self) -> tuple[Command, Frame | None]:
        """The next command and its payload; blocks without spinning.

        Raises:
            ProtocolError: the command is malformed.
        """
        frames: list[Frame] = [self._commands.recv()]
        while self._commands.getsockopt(zmq.RCVMORE):
            # Not copied: it is as large as a request's images.
            frames.append(self._commands.recv(copy=False).buffer)
        return messages.decode_command(frames)

    def close(self, linger_s: float) -> None:
        """Close the sockets after at most `linger_s` seconds of sending what is queued."""
        self.reports.close(linger_s)
        self._context.destroy(linger=0)


def _connect(context: zmq.Context, endpoint: str, max_message: int) -> zmq.Socket:
    socket = context.socket(zmq.DEALER)
    # The executor binds after the workers have been started.
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message)
    socket.connect(endpoint)
    return socket


def _say_hello(socket: zmq.Socket, rank: int, link: messages.LinkName, token: bytes) -> None:
    socket.send(messages.encode(Hello(rank, link, messages.proof(token, "worker", rank, link))))
