"""Patches of vLLM's server, in the process of `vllm serve` alone: how it ends.

For vLLM 0.32.x. Applied when a configuration with HandoffExecutor is made in a
process that holds the server; elsewhere its modules are not even imported.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from vllm_handoff.executor.logs import join_vllm_logging

logger = logging.getLogger(__name__)

_LAUNCHER = "vllm.entrypoints.launchers.launcher"
_MARK = "_vllm_handoff_patch"
# Until an engine that has ended is given up to be seen to have; never needed so far.
_END_S = 60.0
# How a process of the engine ends that was asked to, or had no time left for it; None: it has not ended.
_ENDS = (None, 0, -signal.SIGTERM, -signal.SIGINT, -signal.SIGKILL)


def apply() -> None:
    """Apply the patches if this process holds a server. Can be called again."""
    launcher = sys.modules.get(_LAUNCHER)
    if launcher is not None:
        _end_as_asked(launcher.NoSignalServer)  # type: ignore[attr-defined]


class _AskedFor:
    """An end of the engine that was asked for while it lived, as the thread that brings it about sees it.

    Attributes:
        begun: it has been asked for.
        over: the engine has ended since.
        processes: the engine's, none if another process has started them.
    """

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.over = threading.Event()
        self.processes: list[Any] = []

    @property
    def crashed(self) -> bool:
        """Whether a process has ended by itself, by an exception for instance, and not as it was asked to."""
        return self.begun.is_set() and any(process.exitcode not in _ENDS for process in self.processes)


def _end_as_asked(owner: Any) -> None:
    """Make the server's exit status tell of a dead engine, and a second signal end it at once.

    Why: vLLM 0.32 stops its HTTP server when the engine has died, and then
    exits with 0 as if it had been asked to: a supervisor that restarts what
    fails leaves it down. And while it drains it ignores every further SIGTERM
    and SIGINT, for as long as --shutdown-timeout says.
    How: serve() of vLLM's own subclass of uvicorn's server is wrapped. It
    returns by itself only if the engine has died (an orderly end cancels it),
    and then raises what the requests have got, unless an end was asked for and the engine came to it. vLLM's signal
    handlers do not change; its call of engine.shutdown() shows that the first signal came.
    Can go: when vLLM's server exits with a failure, and acts on a second signal.
    """
    original = owner.serve
    if getattr(original, _MARK, False):
        return

    @functools.wraps(original)
    async def serve(self: Any, sockets: Any = None) -> None:
        from vllm_handoff.executor.configuration import uses_handoff

        engine = getattr(self.config.app.state, "engine_client", None)
        if engine is None or not uses_handoff(engine.vllm_config.parallel_config):
            return await original(self, sockets)
        join_vllm_logging()
        asked = _AskedFor()
        engine.shutdown = _told_of(engine, asked, functools.partial(_end_at_next_signal, self, engine))
        try:
            await original(self, sockets)
        except asyncio.CancelledError:
            if not asked.crashed:
                raise
            # As vLLM does after an orderly end.
            await self.shutdown(sockets)
        if asked.begun.is_set():
            # vLLM's watchdog may look before the end has come to this server: an orderly end kills the engine too.
            await asyncio.to_thread(asked.over.wait, _END_S)
        if asked.crashed or (engine.errored and not asked.begun.is_set()):
            from vllm.v1.engine.exceptions import EngineDeadError

            logger.error("The engine has died, so the server ends with a failure. The cause is above.")
            raise EngineDeadError(suppress_context=True)

    setattr(serve, _MARK, True)
    owner.serve = serve


def _told_of(engine: Any, asked: _AskedFor, tell: Callable[[], None]) -> Callable[..., None]:
    """The engine's `shutdown`, which runs on a thread of its own, with `tell` called on the server's loop first.

    If the engine is alive then, its end has been `asked` for.
    """
    loop, shutdown = asyncio.get_running_loop(), engine.shutdown

    def told(timeout: float | None = None) -> None:
        asked.processes = _processes(engine)
        if not engine.errored:
            asked.begun.set()
        if not loop.is_closed():
            loop.call_soon_threadsafe(tell)
        try:
            shutdown(timeout=timeout)
        finally:
            asked.over.set()

    return told


def _processes(engine: Any) -> list[Any]:
    """The engine's processes, none if another process has started them."""
    manager = engine.engine_core.resources.engine_manager
    return [] if manager is None else list(manager.processes)


def _end_at_next_signal(server: Any, engine: Any) -> None:
    def end() -> None:
        logger.warning("A second signal: the server ends at once, and requests in flight with an error.")
        # The engine's workers see it end, and remove what is left of it.
        for process in _processes(engine):
            process.kill()
        # Connections are not waited for.
        server.force_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
