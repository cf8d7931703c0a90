"""Ends a worker whose engine is gone, even while the worker is stuck in a collective."""

from __future__ import annotations

import logging
import os
import select
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

logger = logging.getLogger(__name__)


def watch_parent(life: Connection, parent_pid: int, before_end: Callable[[], None]) -> None:
    """End this process group as soon as the process `parent_pid` has ended, after calling `before_end`.

    Two signs are watched, because each alone can fail: the life pipe stays open
    if another child of the engine has inherited its write end, and a pidfd
    needs Linux 5.3 (and is refused in some sandboxes).
    """
    poller = select.poll()
    poller.register(life.fileno(), select.POLLIN | select.POLLHUP)
    try:
        poller.register(os.pidfd_open(parent_pid), select.POLLIN)
    except ProcessLookupError:
        _end_group(before_end)
    except (AttributeError, OSError):
        logger.debug("No pidfd for the engine process; its life pipe alone is watched.")
    if os.getppid() != parent_pid:
        # It ended before the watch began.
        _end_group(before_end)

    def wait() -> None:
        # `life` must stay referenced, or its descriptor would be closed and used again.
        while not poller.poll():
            pass
        life.fileno()
        _end_group(before_end)

    threading.Thread(target=wait, name="handoff-parent-watch", daemon=True).start()


def _end_group(before_end: Callable[[], None]) -> None:
    """SIGKILL this process and all it has started; nothing is left to report to."""
    try:
        before_end()
    finally:
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)
