"""The demo's client: completions streamed from an OpenAI-compatible server, all at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PROMPTS = (
    "The capital of France is",
    "Water boils when",
    "Once upon a time, a fox and a crow",
    "The three primary colors are",
    "To make a good cup of tea, first",
    "The Moon goes around the Earth because",
    "Bees are important because",
    "My favorite thing about winter is",
    "A computer is a machine that",
    "The largest ocean on Earth is",
)
# Longer than any answer takes on a slow machine; a server that hangs must not hang the demo.
TIMEOUT_S = 600


@dataclass
class Answer:
    """One completion as it arrived."""

    prompt: str
    text: str = ""
    tokens: int = 0
    error: str = ""


async def stream_all(url: str, requests: int, max_tokens: int, finished: Callable[[Answer], None]) -> list[Answer]:
    """Ask for all completions at once.

    Args:
        url: the server, without a path.
        requests: how many; the prompts repeat after the tenth.
        max_tokens: of each.
        finished: called with each answer when it is complete.

    Returns:
        The answers in the order of the prompts, those that failed with their error.
    """
    import aiohttp

    # trust_env stays off: the server is on this machine, a proxy must not be asked.
    async with aiohttp.ClientSession(
        base_url=url,
        timeout=aiohttp.ClientTimeout(total=TIMEOUT_S),
        connector=aiohttp.TCPConnector(limit=0),
    ) as session:
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(requests)]
        return list(await asyncio.gather(*(_stream(session, prompt, max_tokens, finished) for prompt in prompts)))


async def _stream(session: Any, prompt: str, max_tokens: int, finished: Callable[[Answer], None]) -> Answer:
    import aiohttp

    answer = Answer(prompt)
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    try:
        async with session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                answer.error = f"status {response.status}: {(await response.text())[:300]}"
            else:
                await _read(response.content, answer)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    finished(answer)
    return answer


async def _read(lines: Any, answer: Answer) -> None:
    """Follow one stream of server-sent events to its end."""
    async for line in lines:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            if not answer.tokens:
                answer.error = "the stream held no tokens"
            return
        if not data:
            continue
        event = json.loads(data)
        if "error" in event:
            error = event["error"]
            answer.error = str(error.get("message", error) if isinstance(error, dict) else error)
            return
        for choice in event.get("choices", ()):
            answer.text += choice.get("text", "")
        if usage := event.get("usage"):
            answer.tokens = usage["completion_tokens"]
    answer.error = "the stream broke off"
