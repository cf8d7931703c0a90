"""Ends an engine process whose front end is gone."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

# What vLLM calls the process that its front end starts for the engine.
_ENGINE_PROCESS = "EngineCore"


def end_with_front_end(close: Callable[[], None]) -> None:
    """If this is vLLM's engine process, end it after calling `close` when the process that started it has ended.

    Why: a front end that is killed cannot tell its engine, and the engine of
    vLLM 0.32 then waits for requests for ever, holding the devices' memory. A
    supervisor that restarts the server would not get it back.
    An engine inside a user's own process is the user's business.
    """
    parent = multiprocessing.parent_process()
    if parent is None or not multiprocessing.current_process().name.startswith(_ENGINE_PROCESS):
        return

    def wait() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        logger.error("The front end (process %s) has ended without ending its engine; the engine ends too.", parent.pid)
        try:
            close()
        finally:
            logging.shutdown()
            os._exit(1)

    threading.Thread(target=wait, name="handoff-front-end-watch", daemon=True).start()
