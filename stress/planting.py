"""Faults of the kind that the harness is there to find, planted to show that it does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from vllm_handoff.stress.clients import Chunk, Client

PLANTS = ("lost", "doubled", "swapped")
_IN_REQUEST = 12


class Planting:
    """A client through which one answer arrives with a token lost or doubled; or, from the engine, two swapped."""

    def __init__(self, client: Client, what: str) -> None:
        self._client = client
        self._what = what
        self._requests = 0
        self._planted = False

    @property
    def preemptions(self) -> int:
        return self._client.preemptions

    async def stream(self, req_id: str, prompt: tuple[int, ...], params: dict[str, Any]) -> AsyncIterator[Chunk]:
        self._requests += 1
        if self._what == "swapped" and self._requests == _IN_REQUEST:
            await self._client.call("stress_arm", list(range(64)), "swapped")
        count = 0
        async for chunk in self._client.stream(req_id, prompt, params):
            count += len(chunk.token_ids)
            if self._what != "swapped" and not self._planted and self._requests > _IN_REQUEST and count > 3:
                self._planted = True
                tokens = chunk.token_ids[:-1] if self._what == "lost" else [*chunk.token_ids, chunk.token_ids[-1]]
                chunk = Chunk(tokens, chunk.finish_reason)
            yield chunk

    async def call(self, method: str, *args: Any) -> list[Any]:
        return await self._client.call(method, *args)

    async def close(self) -> None:
        await self._client.close()
