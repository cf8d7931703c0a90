"""Sends the requests of a case to a client and tells what becomes of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from vllm_handoff.stress.clients import Client
from vllm_handoff.stress.plan import Case, Planned

Tell = Callable[[dict[str, Any]], None]


class Load:
    """Runs a case.

    Args:
        tell: takes an event: {"sent": number, "at": s} and then, for each of
            these, {"ended": number, "tokens": [...], "finish": reason, "at": s},
            where the reason is vLLM's, or "left" (the client went away) or "error".
    """

    def __init__(self, client: Client, case: Case, tell: Tell) -> None:
        self._client = client
        self._case = case
        self._tell = tell
        self._stopping = asyncio.Event()
        self._running: set[asyncio.Task] = set()
        self._one_less = asyncio.Event()
        self.failed = False

    def stop(self) -> None:
        """Send no further request; those that were sent are answered."""
        self._stopping.set()

    async def run(self) -> None:
        """Until everything sent is over: after the case's last request, stop(), or an error of the engine."""
        for request in self._case.requests():
            if request.drain:
                await self._until(lambda: not self._running)
            await self._pause(request.gap)
            await self._until(lambda: len(self._running) < self._case.mix.outstanding)
            if self._stopping.is_set() or self.failed:
                break
            task = asyncio.create_task(self._one(request))
            self._running.add(task)
            task.add_done_callback(self._over)
            # Lets an engine in this process take it in before the next one comes.
            await asyncio.sleep(0)
        while self._running:
            await asyncio.wait(self._running)

    def _over(self, task: asyncio.Task) -> None:
        self._running.discard(task)
        self._one_less.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._one_less.clear()
            await self._one_less.wait()

    async def _pause(self, seconds: float) -> None:
        if seconds:
            try:
                await asyncio.wait_for(self._stopping.wait(), seconds)
            except TimeoutError:
                pass

    async def _one(self, request: Planned) -> None:
        tokens: list[int] = []
        self._tell({"sent": request.number, "at": time.monotonic()})
        finish: str | None = None
        error = None
        try:
            if request.abort_seconds is None:
                finish = await self._stream(request, tokens)
            else:
                try:
                    finish = await asyncio.wait_for(self._stream(request, tokens), request.abort_seconds)
                except TimeoutError:
                    finish = "left"
        except Exception as exception:
            self.failed = True
            finish, error = "error", f"{type(exception).__name__}: {exception}"
        event = {"ended": request.number, "tokens": tokens, "finish": finish, "at": time.monotonic()}
        self._tell(event if error is None else {**event, "error": error[:2000]})

    async def _stream(self, request: Planned, tokens: list[int]) -> str | None:
        req_id = f"{self._case.life}-{request.number}"
        async with aclosing(self._client.stream(req_id, request.prompt, request.params)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                tokens += chunk.token_ids
                if chunk.finish_reason is not None:
                    return chunk.finish_reason
                if request.abort_tokens is not None and len(tokens) >= request.abort_tokens:
                    return "left"
        return None
