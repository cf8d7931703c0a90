"""A meeting of two devices before a transfer, so that no NCCL kernel sits on a GPU and waits for its peer.

Each end of a link has a counter in host memory that both processes have
mapped and both devices reach. In a stream, an end writes its counter ("here
for transfer n") and waits until the other's has come as far. Both are stream
memory operations of the CUDA driver: the stream's front end polls, nothing is
launched, no multiprocessor is occupied, and the host goes on. The NCCL kernels
behind them then start within microseconds of each other.

No cycle can form: in every process the transfers of round n are put into
their streams before anything of round n + 1, and the peer of a transfer of
round n needs nothing but earlier work. Two streams may share one of the
device's hardware queues and so wait for each other's waits; by the same order
that delays work and cannot stop it. `widen_queues` makes it rare.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Protocol

_PAGE = mmap.PAGESIZE
_APART = 64  # bytes between the counters, a cache line
_MAPPED_AND_PORTABLE = 0x02 | 0x01  # cudaHostRegisterMapped | cudaHostRegisterPortable
_AT_LEAST = 0x0  # CU_STREAM_WAIT_VALUE_GEQ; compares cyclically, so that the counter may wrap
_BITS = 0xFFFFFFFF


class RendezvousError(RuntimeError):
    """This machine's driver or memory does not allow rendezvous; transfers work without."""


class StreamMemory(Protocol):
    """Stream-ordered operations on 32-bit words that the device reaches."""

    def write(self, stream: int, address: int, value: int) -> None:
        """Once the stream gets there, after what is before it: set the word at `address`."""

    def wait(self, stream: int, address: int, value: int) -> None:
        """Let the stream wait until the word at `address` has come as far as `value`."""


class CudaStreamMemory:
    """The CUDA driver's operations. A call takes about 3 us of the host's time."""

    def __init__(self) -> None:
        # PyDLL: with a call this short, giving up the interpreter's lock costs more than it gives.
        driver = ctypes.PyDLL("libcuda.so.1")
        self._write, self._wait = driver.cuStreamWriteValue32_v2, driver.cuStreamWaitValue32_v2
        self._address = driver.cuMemHostGetDevicePointer_v2
        for operation in (self._write, self._wait):
            operation.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]

    def write(self, stream: int, address: int, value: int) -> None:
        self._check(self._write(stream, address, value, 0), "cuStreamWriteValue32")

    def wait(self, stream: int, address: int, value: int) -> None:
        self._check(self._wait(stream, address, value, _AT_LEAST), "cuStreamWaitValue32")

    def device_address(self, host_address: int) -> int:
        """The device's address of registered host memory."""
        found = ctypes.c_uint64()
        self._check(self._address(ctypes.byref(found), ctypes.c_void_p(host_address), 0), "cuMemHostGetDevicePointer")
        return found.value

    @staticmethod
    def _check(error: int, what: str) -> None:
        if error:
            raise RendezvousError(f"{what} failed with CUDA error {error}")


class SharedPage:
    """A page of memory that two processes share. It has no name in any file system, so none can be left behind."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.memory = mmap.mmap(fd, _PAGE)
        self._anchor = ctypes.c_char.from_buffer(self.memory)
        self.host_address = ctypes.addressof(self._anchor)

    @classmethod
    def create(cls) -> SharedPage:
        """A new page, zeroed."""
        fd = os.memfd_create("vllm-handoff-rendezvous", os.MFD_CLOEXEC)
        os.ftruncate(fd, _PAGE)
        return cls(fd)

    @classmethod
    def open(cls, path: str) -> SharedPage:
        """The page that another process of this user made. Raises OSError."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @property
    def path(self) -> str:
        """Where another process of this user can open it, until `forget_path`."""
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def forget_path(self) -> None:
        """Close the descriptor; the mapping stays."""
        os.close(self._fd)

    def register(self, driver: CudaStreamMemory) -> int:
        """Make the page known to this process's CUDA context; its address on the device.

        Raises:
            RendezvousError: it cannot be.
        """
        import torch

        error = torch.cuda.cudart().cudaHostRegister(self.host_address, _PAGE, _MAPPED_AND_PORTABLE)
        if int(error):
            raise RendezvousError(f"cudaHostRegister failed with error {int(error)}")
        return driver.device_address(self.host_address)


class Rendezvous:
    """One end of a link's meetings.

    Args:
        memory: the operations on words.
        base: the device's address of the shared page.
        end: which end this is, 0 or 1.
    """

    def __init__(self, memory: StreamMemory, base: int, end: int) -> None:
        self._memory = memory
        self._mine = base + _APART * end
        self._theirs = base + _APART * (1 - end)
        self._count = 0

    def meet(self, stream: int) -> None:
        """Let a stream go on once both ends have come to their next transfer. Both ends count the same transfers."""
        self._count = (self._count + 1) & _BITS
        # Written before waiting: the other end may be waiting for it.
        self._memory.write(stream, self._mine, self._count)
        self._memory.wait(stream, self._theirs, self._count)


def probe(memory: StreamMemory, base: int, stream: int) -> None:
    """Try both operations on a word of our own, at the end of the page.

    Raises:
        RendezvousError: the driver refuses.
    """
    word = base + _PAGE - _APART
    memory.write(stream, word, 1)
    memory.wait(stream, word, 1)


def widen_queues() -> None:
    """Ask for as many hardware queues as there can be, unless the user has chosen. Before CUDA is initialised.

    Why: with CUDA's default of 8, streams share queues, and a stream that waits
    in a rendezvous would hold up others that are ready.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
