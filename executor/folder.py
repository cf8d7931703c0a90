"""The private folder of one executor: its sockets, its rendezvous file, and the token that proves a peer."""

from __future__ import annotations

import secrets
import shutil
import tempfile
from pathlib import Path

from vllm_handoff.executor import messages

# The kernel's limit on a unix socket's path is 108 bytes with the final zero.
_MAX_SOCKET_PATH = 107
_SHARED_MEMORY = Path("/dev/shm")


class ControlFolder:
    """A 0700 folder of our own, gone when the executor or its last worker ends."""

    def __init__(self) -> None:
        self.token = secrets.token_bytes(messages.TOKEN_BYTES)
        base = tempfile.gettempdir()
        if len(f"{base}/vllm-handoff-xxxxxxxx/commands".encode()) > _MAX_SOCKET_PATH:
            base = "/tmp"
        self.path = tempfile.mkdtemp(prefix="vllm-handoff-", dir=base)

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
        remove_folder(self.path)


def unlink_shared_memory(folder: str) -> None:
    for path in _SHARED_MEMORY.glob(f"{Path(folder).name}-*"):
        path.unlink(missing_ok=True)


def remove_folder(folder: str) -> None:
    """Remove what the executor of `folder` has left in file systems; harmless if it is gone."""
    unlink_shared_memory(folder)
    shutil.rmtree(folder, ignore_errors=True)
