"""Large payloads of rounds, in memory that the engine's process shares with its workers.

What a prompt's images come to is several megabytes, in the round that admits it.
Through a socket each worker's copy of that takes milliseconds, of the engine's
time as well. Small payloads, which all others are, take the sockets.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from pickle import PickleBuffer

from vllm_handoff.executor.errors import ProtocolError

logger = logging.getLogger(__name__)

# Touched, and so taken, only as far as the largest payload reaches.
CAPACITY = 32 << 20
LEAST = 256 << 10
_SHARED_MEMORY = Path("/dev/shm")

Piece = bytes | PickleBuffer


def _path(folder: str) -> Path:
    # Named as what ControlFolder.unlink_shared_memory removes.
    return _SHARED_MEMORY / f"{Path(folder).name}-payload"


class SharedPayload:
    """The engine's end: room for one payload, until every worker has taken it. A second meanwhile takes the sockets."""

    def __init__(self, folder: str) -> None:
        self._free = True
        self._allocated = 0
        self._memory: mmap.mmap | None = None
        try:
            self._fd = os.open(_path(folder), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                # Nothing is taken yet, so this works on a full file system too.
                os.ftruncate(self._fd, CAPACITY)
                self._memory = mmap.mmap(self._fd, CAPACITY)
            except OSError:
                os.close(self._fd)
                _path(folder).unlink()
                raise
        except OSError as error:
            logger.info("Large payloads take the sockets: no shared memory (%s).", error)

    def put(self, pieces: Sequence[Piece]) -> int:
        """Write a payload's pieces one after the other.

        Returns:
            How many bytes they are; 0 if they have to take the sockets: too
            small, too large, the room is taken, or /dev/shm is full.
        """
        views = [piece.raw() if isinstance(piece, PickleBuffer) else memoryview(piece) for piece in pieces]
        size = sum(view.nbytes for view in views)
        if self._memory is None or not self._free or not LEAST <= size <= CAPACITY or not self._reserve(size):
            return 0
        at = 0
        for view in views:
            self._memory[at : at + view.nbytes] = view
            at += view.nbytes
        self._free = False
        return size

    def release(self) -> None:
        """Every worker has taken the payload."""
        self._free = True

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            os.close(self._fd)
            self._memory = None

    def _reserve(self, size: int) -> bool:
        if size > self._allocated:
            try:
                # Writing to a hole of a full file system would be a SIGBUS.
                os.posix_fallocate(self._fd, 0, size)
            except OSError:
                return False
            self._allocated = size
        return True


class SharedPayloadReader:
    """A worker's end."""

    def __init__(self, folder: str) -> None:
        self._memory = memoryview(b"")
        # Anybody can make a file of this name before the engine does, which then goes without; so do its workers.
        with contextlib.suppress(FileNotFoundError):
            found = (path := _path(folder)).lstat()
            if found.st_uid == os.getuid() and found.st_size == CAPACITY:
                with path.open("rb") as file:
                    self._memory = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def payload(self, size: int) -> memoryview:
        """The payload of a command that says so, valid until the command's reply.

        Raises:
            ProtocolError: it cannot be that large.
        """
        if not 0 < size <= len(self._memory):
            raise ProtocolError(f"A command announces {size} bytes in shared memory, which has {len(self._memory)}.")
        return self._memory[:size]
