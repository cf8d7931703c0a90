"""The private folder of one executor: its sockets, its rendezvous file, and the token that proves a peer."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from pathlib import Path

from vllm_handoff.executor import messages

# The kernel's limit on a unix socket's path is 108 bytes with the final zero.
_MAX_SOCKET_PATH = 107
_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "vllm-handoff-"
_LOCK = "lock"


class ControlFolder:
    """A 0700 folder of our own, removed by the executor's end or, if that was killed, by its workers'.

    If all of them were killed at once, the next executor removes it.
    """

    def __init__(self) -> None:
        self.token = secrets.token_bytes(messages.TOKEN_BYTES)
        base = tempfile.gettempdir()
        if len(f"{base}/{_PREFIX}xxxxxxxx/commands".encode()) > _MAX_SOCKET_PATH:
            base = "/tmp"
        remove_abandoned(Path(base))
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
        try:
            self._lock = self._make_lock()
        except OSError:
            shutil.rmtree(self.path, ignore_errors=True)
            raise

    def _make_lock(self) -> int:
        """The descriptor of a file that is locked as long as this process, or a forked worker, is alive."""
        # It gets its name last: whoever can see it sees it locked.
        partial = f"{self.path}/{_LOCK}.partial"
        lock = os.open(partial, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        Path(partial).rename(f"{self.path}/{_LOCK}")
        return lock

    def endpoint(self, link: messages.LinkName) -> str:
        return f"ipc://{self.path}/{link}"

    @property
    def rendezvous(self) -> str:
        """A torch.distributed init method whose file goes away with the folder.

        vLLM's CPU communicator names its shared memory by the file's name alone,
        so engines that run at the same time need different ones.
        """
        return f"file://{self.path}/{Path(self.path).name}"

    def unlink_shared_memory(self) -> None:
        """Remove the names of the workers' shared memory, once every worker has it mapped.

        vLLM's CPU communicator never does: 8 MB of memory would stay behind
        each engine, however orderly it ends.
        """
        unlink_shared_memory(self.path)

    def remove(self) -> None:
        """Remove the folder and what belongs to it. Call once."""
        remove_folder(self.path)
        os.close(self._lock)


def unlink_shared_memory(folder: str) -> None:
    for path in _SHARED_MEMORY.glob(f"{Path(folder).name}-*"):
        path.unlink(missing_ok=True)


def remove_folder(folder: str) -> None:
    """Remove what the executor of `folder` has left in file systems; harmless if it is gone."""
    unlink_shared_memory(folder)
    shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(base: Path) -> None:
    """Remove the folders in `base` whose executor and workers are all dead, if they are this user's."""
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            # Just being made, or just being removed.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_folder(str(folder))
        except BlockingIOError:
            pass
        finally:
            os.close(lock)
