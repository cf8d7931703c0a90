"""What the engine's process and the process that started it, its front end, do about each other's end."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import threading
import time
from collections.abc import Callable

from vllm_handoff.executor.board import find_folder
from vllm_handoff.executor.folder import remove_abandoned

logger = logging.getLogger(__name__)

# What vLLM calls the process that its front end starts for the engine.
_ENGINE_PROCESS = "EngineCore"
# The kernel takes a moment to end a process that was killed.
_KILLED_S = 2.0


def end_with_front_end(close: Callable[[float], None]) -> None:
    """If this is vLLM's engine process, end it after calling `close` when the process that started it has ended.

    `close` is given 0, the seconds that workers get to leave by themselves:
    nobody is left to whom they could answer, and one that loads a model would
    use all of the time that it gets.

    Why: a front end that is killed cannot tell its engine, and the engine of
    vLLM 0.32 then waits for requests for ever, holding the devices' memory. A
    supervisor that restarts the server would not get it back.
    An engine inside a user's own process is the user's business.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(_ENGINE_PROCESS):
        return
    # A fork inherits the descriptor that wakes its front end's event loop, and what it writes there the front end
    # takes for signals of its own: the SIGTERM that it sends to the engine would come back as a second one.
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        logger.error("The front end (process %s) has ended without ending its engine; the engine ends too.", parent.pid)
        try:
            close(0.0)
        finally:
            logging.shutdown()
            os._exit(1)

    threading.Thread(target=wait, name="handoff-front-end-watch", daemon=True).start()


def remove_at_exit(instance: str) -> None:
    """Remove what is left of the engine `instance` in file systems when this process, its front end, ends.

    Why: unless told otherwise by --shutdown-timeout, `vllm serve` of vLLM 0.32
    sends its engine SIGTERM and, in the same moment, kills it and its workers.
    Nobody but the front end is left then to remove their folder.
    """
    # Below zero: after multiprocessing has ended this process's children.
    multiprocessing.util.Finalize(None, _remove, args=(instance,), exitpriority=-100)


def _remove(instance: str) -> None:
    deadline = time.monotonic() + _KILLED_S
    while (folder := find_folder(instance)) is not None:
        # It is locked until the last process of the engine is gone.
        remove_abandoned(folder.parent)
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)
