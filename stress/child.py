"""The process that holds the engine (or the connections to a server) and the clients.

Started by life.py with its orders as JSON lines on stdin, and events as JSON
lines on a descriptor. It checks nothing: what it reports is what clients saw.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import traceback
from typing import Any

from vllm_handoff.stress.clients import Client, EngineClient, ServerClient
from vllm_handoff.stress.load import Load
from vllm_handoff.stress.plan import Case
from vllm_handoff.stress.planting import Planting

_COUNT_EVERY_S = 1.0


class Child:
    """Obeys the orders of one life.

    Orders: {"run": case}, {"stop": true} (send no further request),
    {"arm": {"ranks": [...], "what": ...}}, {"quit": true}.
    Events: {"ready": [{"rank", "pid"}]}, those of load.py, {"counts": {...}},
    {"armed": true}, {"done": true}.
    """

    def __init__(self, setup: dict[str, Any], events: int) -> None:
        self._setup = setup
        self._events = os.fdopen(events, "w", buffering=1)
        self._orders: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._load: Load | None = None
        self._client: Client

    def _tell(self, event: dict[str, Any]) -> None:
        self._events.write(json.dumps(event) + "\n")

    async def serve(self) -> int:
        """Until told to quit, or until the engine has failed. Returns the exit status."""
        if "url" in self._setup:
            self._client = ServerClient(self._setup["url"], self._setup["model"])
        else:
            self._client = EngineClient(self._setup["options"], self._setup["toy"])
        if "plant" in self._setup:
            self._client = Planting(self._client, self._setup["plant"])
        self._tell({"ready": await self._client.call("stress_begin")})
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read_orders, args=(loop,), daemon=True).start()
        counting = asyncio.create_task(self._count())
        running: asyncio.Task | None = None
        status = 0
        while "quit" not in (order := await self._orders.get()):
            if "run" in order:
                # Made before its task begins: an order to stop may be the next one in the queue.
                self._load = Load(self._client, Case.of(order["run"]), self._tell)
                running = asyncio.create_task(self._run(self._load))
            elif "stop" in order and self._load is not None:
                self._load.stop()
            elif "arm" in order:
                # The rank that a fault strikes may never answer.
                asyncio.create_task(self._arm(order["arm"]))  # noqa: RUF006
            elif "failed" in order:
                status = 1
                break
        counting.cancel()
        if running is not None:
            running.cancel()
        await self._client.close()
        return status

    def _read_orders(self, loop: asyncio.AbstractEventLoop) -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(self._orders.put_nowait, json.loads(line))
        loop.call_soon_threadsafe(self._orders.put_nowait, {"quit": True})

    async def _run(self, load: Load) -> None:
        await load.run()
        await self._tell_counts()
        self._tell({"done": True})
        if load.failed:
            self._orders.put_nowait({"failed": True})

    async def _arm(self, arm: dict[str, Any]) -> None:
        with contextlib.suppress(Exception):
            await self._client.call("stress_arm", arm["ranks"], arm["what"])
        self._tell({"armed": True})

    async def _count(self) -> None:
        while True:
            await asyncio.sleep(_COUNT_EVERY_S)
            await self._tell_counts()

    async def _tell_counts(self) -> None:
        # A failed engine is for the requests to notice.
        with contextlib.suppress(Exception):
            counts = await self._client.call("stress_counts")
            if counts:
                # The first stage sees every round.
                self._tell({"counts": {**counts[0], "preemptions": self._client.preemptions}})


def main() -> None:
    """Run the child that life.py describes on the command line."""
    status = 1
    try:
        status = asyncio.run(Child(json.loads(sys.argv[1]), int(sys.argv[2])).serve())
    except Exception:
        traceback.print_exc()
    # Without unwinding: an engine that did not start can leave threads that never end.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
