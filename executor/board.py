"""Boards: what each process of an engine has done so far, in memory that others may read at any time.

The engine's process counts rounds, and each worker its own time; metrics are
served by the API server's process. Nothing is sent between them. Each writer
keeps its numbers in a small mapped file in the executor's private folder, and
whoever wants to know looks. So a round costs the engine 3 to 4 us, a worker
about 11 us, and the readers nothing; the numbers stay readable when the engine is stuck, which is
when they matter most; and after its end the reader's mapping still holds the
last ones, although the folder is gone.

vLLM's own statistics could carry a few numbers along, but only from the engine
and only with a round's output: an engine that is stuck would say nothing.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import struct
import tempfile
import zlib
from enum import IntEnum
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

ENGINE_BOARD = "engine.board"
STAGES_BOARD = "stages.board"
_WORKER_BOARD = "rank-{}.board"
_BASE_PREFIX = "vllm-handoff-"
# Named after the engine, so that a reader that knows the engine's configuration finds the folder.
_READS = 10
_MARKER = "instance-{}"


class Phase(IntEnum):
    """What a worker's host is doing."""

    COMMAND = 0  # waits for a command
    CALL = 1  # serves a call
    FORWARD = 2  # runs a round's forward
    SAMPLING = 3  # samples a round
    HOP = 4  # waits for a round's hidden states
    HANDOFF = 5  # waits for sampled tokens that a round needs
    SEND = 6  # waits until a peer has taken what it was sent


class WorkerCounts(msgspec.Struct):
    """What one worker has done, in rounds and in ns of the machine's monotonic clock.

    On a CPU the host waits for transfers itself, and its times are the stage's.
    On a GPU the device does, and has times of its own; they are a few rounds late.

    Attributes:
        rounds: rounds run.
        working: 1 while a command is served, 0 while the next is awaited.
        since_ns: when that began.
        busy_ns: time that commands took, less what was spent waiting for transfers.
        idle_ns: time without a command.
        hop_wait_ns: time that the host waited for hidden states.
        handoff_wait_ns: time that the host waited for sampled tokens.
        deliveries: rounds that arrived while this worker was idle.
        delivery_ns: how long these took from the engine to here.
        on_device: 1 if the device's times are counted.
        device_busy_ns, device_idle_ns, device_hop_wait_ns, device_handoff_wait_ns: the device's
            time in rounds less waiting, between rounds, and waiting for transfers.
        phase: a Phase, what the host is doing.
        phase_ns: when that began.
        round: the round that the host runs, or ran last; -1 before the first, as below.
        launched: the last round of which the host has launched everything.
        device_round: the last round that the device has finished, looked at once a second or more often.
        output_round: the round whose output is being waited for or finished; -1 for none.
        launch_ns: what launching a round that only decodes has taken the host of late; 0 if not known, and on a CPU.
    """

    rounds: int = 0
    working: int = 0
    since_ns: int = 0
    busy_ns: int = 0
    idle_ns: int = 0
    hop_wait_ns: int = 0
    handoff_wait_ns: int = 0
    deliveries: int = 0
    delivery_ns: int = 0
    on_device: int = 0
    device_busy_ns: int = 0
    device_idle_ns: int = 0
    device_hop_wait_ns: int = 0
    device_handoff_wait_ns: int = 0
    phase: int = Phase.COMMAND
    phase_ns: int = 0
    round: int = -1
    launched: int = -1
    device_round: int = -1
    output_round: int = -1
    launch_ns: int = 0


class Board:
    """The writer's end. Every field is an int64, written alone, so a reader never sees half a number.

    It could see one field newer than another, and reads again if so.
    """

    def __init__(self, path: Path, counts: msgspec.Struct) -> None:
        self._layout = _layout(type(counts))
        self._tag = _tag(type(counts))
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # Not ftruncate: on a full file system, writing to a hole would be a SIGBUS instead of an error here.
            os.posix_fallocate(fd, 0, self._layout.size)
            self._memory = mmap.mmap(fd, self._layout.size)
        finally:
            os.close(fd)
        self.write(counts)

    def write(self, counts: msgspec.Struct) -> None:
        self._layout.pack_into(self._memory, 0, self._tag, *msgspec.structs.astuple(counts))


_Counts = TypeVar("_Counts", bound=msgspec.Struct)


class BoardReader(Generic[_Counts]):
    """A reader's end; goes on reading the last numbers after the writer is gone.

    Raises:
        OSError: there is no such board.
        ValueError: it is not a board of this type.
    """

    def __init__(self, path: Path, counts: type[_Counts]) -> None:
        self._type = counts
        self._layout = _layout(counts)
        with path.open("rb") as file:
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._memory) != self._layout.size or self._layout.unpack_from(self._memory)[0] != _tag(counts):
            raise ValueError(f"{path} is not a board of {counts.__name__}, or of another version")

    def read(self) -> _Counts:
        before = self._layout.unpack_from(self._memory)
        for _ in range(_READS):
            # Twice the same: no write was under way.
            if (values := self._layout.unpack_from(self._memory)) == before:
                break
            before = values
        return self._type(*before[1:])


def _layout(counts: type[msgspec.Struct]) -> struct.Struct:
    return struct.Struct(f"{1 + len(counts.__struct_fields__)}q")


def _tag(counts: type[msgspec.Struct]) -> int:
    """Stands first on a board and says what its numbers are."""
    return zlib.crc32(",".join((counts.__name__, *counts.__struct_fields__)).encode())


def worker_board(folder: str, rank: int) -> Path:
    return Path(folder) / _WORKER_BOARD.format(rank)


def announce(folder: str, *names: str) -> None:
    """Make the boards in `folder` findable under the names of their engine."""
    for name in names:
        (Path(folder) / _MARKER.format(name)).touch(mode=0o600)


def engine_name(instance: str, index: int) -> str:
    """The name of one of the engines of a configuration, which are data-parallel replicas."""
    return f"{instance}-{index}"


def sibling_name(index: int) -> str | None:
    """The name of that engine for processes with the same parent; None if no process of ours started this one.

    One of several API servers makes a configuration of its own, with an
    instance_id of its own; it and the engines are started by the same process.
    """
    parent = multiprocessing.parent_process()
    return None if parent is None else engine_name(f"child-of-{parent.pid}", index)


def find_folder(name: str) -> Path | None:
    """The folder of this user's engine of that name, None if it has none (yet)."""
    for base in {tempfile.gettempdir(), "/tmp"}:
        for marker in Path(base).glob(f"{_BASE_PREFIX}*/{_MARKER.format(name)}"):
            if marker.parent.stat().st_uid == os.getuid():
                return marker.parent
    return None
