"""The exit status of `vllm serve`: a failure if its engine has died, unless its end was asked for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_handoff.executor import server_patches


class Engine:
    """Like vLLM's client: an orderly end kills its processes, and then it counts as dead."""

    def __init__(self) -> None:
        backend = "vllm_handoff.executor.HandoffExecutor"
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(distributed_executor_backend=backend))
        self.errored = False
        self.process = SimpleNamespace(exitcode=None)
        self.engine_core = SimpleNamespace(
            resources=SimpleNamespace(engine_manager=SimpleNamespace(processes=[self.process]))
        )
        self.exitcode = 0

    def shutdown(self, timeout: float | None = None) -> None:
        self.errored = True
        self.process.exitcode = self.exitcode


def serve(*events: str, exitcode: int = 0, cancels: bool = False) -> list[str]:
    """Serve until `events` are over: the engine dies, or an end is asked for, on a thread as vLLM does it.

    Args:
        exitcode: of the engine's process, once it has ended as it was asked to.
        cancels: the end cancels the server, as vLLM does if it is there before the watchdog.

    Returns:
        What became of the server's connections.
    """
    connections = ["open"]

    class Server:
        def __init__(self, engine: Engine) -> None:
            self.config = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(engine_client=engine)))

        async def serve(self, sockets: Any = None) -> None:
            for event in events:
                if event == "dies":
                    engine.errored = True
                else:
                    thread = threading.Thread(target=engine.shutdown, kwargs={"timeout": 0})
                    thread.start()
                    thread.join(30)
            if cancels:
                raise asyncio.CancelledError

        async def shutdown(self, sockets: Any = None) -> None:
            connections[:] = ["closed"]

    engine = Engine()
    engine.exitcode = exitcode
    server_patches._end_as_asked(Server)
    server_patches._end_as_asked(Server)  # plugins load again and again
    with contextlib.suppress(asyncio.CancelledError):
        asyncio.run(Server(engine).serve())
    return connections


@pytest.mark.parametrize("events", [["dies"], ["dies", "end"]])
def test_an_engine_that_dies_is_a_failure(events: list[str]) -> None:
    with pytest.raises(EngineDeadError):
        serve(*events)


def test_an_end_that_was_asked_for_is_none_though_it_kills_the_engine() -> None:
    serve("end")


@pytest.mark.parametrize("exitcode", [1, -11])
@pytest.mark.parametrize("cancels", [False, True])
def test_an_engine_that_crashes_on_its_way_to_an_end_is_a_failure(cancels: bool, exitcode: int) -> None:
    with pytest.raises(EngineDeadError):
        serve("end", exitcode=exitcode, cancels=cancels)


def test_a_signal_on_the_way_is_none_and_vllm_closes_the_connections() -> None:
    assert serve("end", exitcode=-9, cancels=True) == ["open"]


def test_nor_is_a_server_that_ends_with_its_engine_alive() -> None:
    serve()
