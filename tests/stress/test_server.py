"""The harness against a server: a small one here, that speaks as much of OpenAI's protocol as it takes."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm_handoff.executor.cli import main
from vllm_handoff.stress import toy_tokens

web = pytest.importorskip("aiohttp.web")


class FakeServer:
    """Answers with the toy's tokens; the request number `wrong` gets one of them twice."""

    def __init__(self) -> None:
        self.requests = 0
        self.wrong = -1
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        assert self._started.wait(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._start())
        self._loop.run_forever()

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        self._started.set()

    async def _models(self, request: Any) -> Any:
        return web.json_response({"data": [{"id": "toy"}]})

    async def _complete(self, request: Any) -> Any:
        body = await request.json()
        self.requests += 1
        assert body["model"] == "toy" and body["stream"] and body["return_token_ids"]
        tokens, finish = toy_tokens.answer(body["prompt"], body, layers=2, context=512)
        if self.requests == self.wrong:
            tokens = [tokens[0], *tokens]
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for index, token in enumerate(tokens):
            last = index == len(tokens) - 1
            choice = {"index": 0, "text": "", "token_ids": [token], "finish_reason": finish if last else None}
            await response.write(f"data: {json.dumps({'choices': [choice]})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.close()


def stress(server: FakeServer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, dict[str, Any]]:
    monkeypatch.chdir(folder)
    options = ["--url", server.url, "--pool", "6", "--rate", "100", "--output", "2", "30", "--json", "report.json"]
    status = main(["stress", "--duration", "6", "--shrink", "3", *options])
    return status, json.loads((folder / "report.json").read_text())


def test_a_server_that_answers_right(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, report = stress(server, tmp_path, monkeypatch)
    assert status == 0 and report["problems"] == []
    assert report["answered"] > 50 and report["left"] > 0


def test_a_server_that_doubles_a_token(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.wrong = 40
    status, report = stress(server, tmp_path, monkeypatch)
    assert status == 1 and report["problems"][0]["kind"] in ("doubled", "long")


def test_faults_and_a_server_do_not_go_together(server: FakeServer, capsys: pytest.CaptureFixture) -> None:
    assert main(["stress", "--url", server.url, "--faults", "kill"]) == 2
    assert "faults cannot be injected" in capsys.readouterr().err
