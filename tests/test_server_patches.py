"""The exit status of `vllm serve`: a failure if its engine has died, unless its end was asked for."""

from __future__ import annotations

import asyncio
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

    def shutdown(self, timeout: float | None = None) -> None:
        self.errored = True


def serve(*events: str) -> None:
    """Serve until `events` are over: the engine dies, or an end is asked for, on a thread as vLLM does it."""

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

    engine = Engine()
    server_patches._end_as_asked(Server)
    server_patches._end_as_asked(Server)  # plugins load again and again
    asyncio.run(Server(engine).serve())


@pytest.mark.parametrize("events", [["dies"], ["dies", "end"]])
def test_an_engine_that_dies_is_a_failure(events: list[str]) -> None:
    with pytest.raises(EngineDeadError):
        serve(*events)


def test_an_end_that_was_asked_for_is_none_though_it_kills_the_engine() -> None:
    serve("end")


def test_nor_is_a_server_that_ends_with_its_engine_alive() -> None:
    serve()
