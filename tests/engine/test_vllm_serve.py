"""`vllm serve` itself, with our executor: how it drains, and what is left when any part of it is killed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engines import EXECUTOR
from vllm_handoff.executor.server_process import Process, ServerProcess, family_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

STARTUP_S = 180
# Within which everything is to be over after a fault: generous, for a machine with other work.
OVER_S = 30


class Server:
    """One `vllm serve` with two stages."""

    def __init__(self, model: Path, folder: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.temporary = folder / "t"
        self.temporary.mkdir()
        command = [str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--port", str(self.port)]
        command += ["--host", "127.0.0.1", "--distributed-executor-backend", EXECUTOR, "--pipeline-parallel-size", "2"]
        command += ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager"]
        command += ["--dtype", "float32", "--served-model-name", "tiny", *options]
        self.process = ServerProcess(command, {**os.environ, "TMPDIR": str(self.temporary)}, folder / "server.log")

    def wait_ready(self) -> None:
        self.process.wait_ready(f"http://127.0.0.1:{self.port}/health", STARTUP_S)

    def named(self, *names: str) -> list[int]:
        """Processes of the server whose title holds one of `names`, by their ids."""
        found = []
        for process in self.process.family():
            with contextlib.suppress(OSError):
                title = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode(errors="replace")
                if any(name in title for name in names):
                    found.append(process.pid)
        return sorted(found)

    def exit_status(self) -> int | None:
        within(OVER_S, lambda: self.process.returncode is not None)
        return self.process.returncode

    def left(self) -> list[str]:
        """What is left of it: processes, our folders, shared memory named after them."""
        left = [str(process.pid) for process in family_of(self.process.pid, self._known)]
        left += [str(path) for path in self.temporary.glob("vllm-handoff-*")]
        return left

    def remember(self) -> set[Process]:
        self._known: set[Process] = self.process.family()
        return self._known

    def log(self) -> str:
        return self.process.log.read_text(errors="replace")


@contextlib.contextmanager
def serving(model: Path, folder: Path, *options: str) -> Iterator[Server]:
    server = Server(model, folder, *options)
    try:
        server.wait_ready()
        server.remember()
        yield server
    finally:
        for process in server.process.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def within(seconds: float, condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Answer(threading.Thread):
    """One streamed request: its tokens so far, and how it ended."""

    def __init__(self, server: Server, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url = f"http://127.0.0.1:{server.port}/v1/completions"
        self._max_tokens = max_tokens
        self.tokens = 0
        self.finish = ""
        self.error = ""
        self.start()

    def run(self) -> None:
        body = {"model": "tiny", "prompt": [8, 9, 10], "max_tokens": self._max_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "return_token_ids": True}
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        try:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            with opener.open(request, timeout=OVER_S + 60) as response:
                for line in response:
                    self._take(line.decode().removeprefix("data: ").strip())
        except (OSError, ValueError) as error:
            self.error = repr(error)
        if not (self.error or self.finish):
            # The stream was cut: what a client's library reports as an error.
            self.error = "the stream ended before the answer did"

    def _take(self, data: str) -> None:
        if not data or data == "[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            self.error = str(event["error"])
        for choice in event.get("choices", ()):
            self.tokens += len(choice.get("token_ids") or ())
            self.finish = choice.get("finish_reason") or self.finish


def in_flight(server: Server, *lengths: int) -> list[Answer]:
    """Requests of these lengths, each with its first tokens."""
    answers = [Answer(server, length) for length in lengths]
    assert within(60, lambda: all(answer.tokens > 3 for answer in answers)), [vars(answer) for answer in answers]
    return answers


def assert_failed(server: Server, answers: list[Answer]) -> None:
    """The engine's death is an error for every request and a failure of the server, and nothing is left."""
    for answer in answers:
        answer.join(OVER_S)
        assert answer.error and not answer.finish, vars(answer)
    assert server.exit_status() not in (0, None), server.log()[-3000:]
    assert "The engine has died, so the server ends with a failure." in server.log()
    assert within(OVER_S, lambda: not server.left()), server.left()


def test_sigterm_drains_and_a_second_one_ends_at_once(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(tiny_llama, tmp_path, "--shutdown-timeout", "120") as server:
        short, *long = in_flight(server, 150, *[1000] * 12)
        os.kill(server.process.pid, signal.SIGTERM)
        short.join(OVER_S)
        # What was in flight goes on.
        assert (short.tokens, short.finish, short.error) == (150, "length", "")
        assert server.process.returncode is None and not any(answer.finish for answer in long)
        os.kill(server.process.pid, signal.SIGTERM)
        # Far below the 120 s that it may drain for.
        assert server.exit_status() == 0, server.log()[-3000:]
        for answer in long:
            answer.join(OVER_S)
            # Ended, and told so.
            assert answer.error and not answer.finish, vars(answer)
        assert within(OVER_S, lambda: not server.left()), server.left()


def test_a_dead_engine_is_a_failure_of_the_server(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(tiny_llama, tmp_path) as server:
        (engine,) = server.named("EngineCore")
        answers = in_flight(server, 1000, 1000)
        os.kill(engine, signal.SIGKILL)
        assert_failed(server, answers)


def test_an_engine_that_crashes_while_it_drains_is_a_failure_too(tiny_llama: Path, tmp_path: Path) -> None:
    with serving(tiny_llama, tmp_path, "--shutdown-timeout", "120") as server:
        answers = in_flight(server, 1000, 1000)
        os.kill(server.process.pid, signal.SIGTERM)
        assert within(OVER_S, lambda: "mode=drain" in server.log()), server.log()[-3000:]
        os.kill(server.named("Worker")[0], signal.SIGKILL)
        assert_failed(server, answers)


def _samples(server: Server, name: str) -> dict[str, float]:
    """A metric's value for each engine."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as response:
        text = response.read().decode()
    found = re.findall(rf'^{name}\{{engine="([0-9]+)"[^}}]*\}} ([0-9.]+)$', text, re.MULTILINE)
    return {engine: float(value) for engine, value in found}


def test_replicas_behind_several_api_servers(tiny_llama: Path, tmp_path: Path) -> None:
    """Two engines of two stages each, and as many API servers, which is vLLM's default then."""
    with serving(tiny_llama, tmp_path, "--data-parallel-size", "2") as server:
        assert len(server.named("EngineCore_DP")) == 2 and len(server.named("APIServer_")) == 2
        answers = in_flight(server, *[30] * 6)
        for answer in answers:
            answer.join(OVER_S)
            assert (answer.tokens, answer.finish, answer.error) == (30, "length", "")
        # A server counts an answer's last tokens a moment after it has sent them.
        assert within(OVER_S, lambda: sum(_samples(server, "vllm:generation_tokens_total").values()) == 6 * 30)
        # Each connection goes to one of the servers, as the kernel likes.
        for _ in range(12):
            rounds = _samples(server, "vllm_handoff_rounds_completed_total")
            tokens = _samples(server, "vllm:generation_tokens_total")
            assert rounds.keys() == tokens.keys() == {"0", "1"}
            # A replica that got nothing has run nothing.
            assert {engine for engine in rounds if rounds[engine] >= 30} == {
                engine for engine in tokens if tokens[engine]
            }
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.exit_status() == 0, server.log()[-3000:]
        assert within(OVER_S, lambda: not server.left()), server.left()


@pytest.mark.parametrize("when", ["serving", "starting"])
def test_nothing_outlives_a_killed_server(tiny_llama: Path, tmp_path: Path, when: str) -> None:
    server = Server(tiny_llama, tmp_path)
    try:
        if when == "serving":
            server.wait_ready()
            in_flight(server, 1000, 1000)
        else:
            # Its workers are there, and have yet to load their model.
            assert within(STARTUP_S, lambda: len(server.named("Worker", "spawn_main")) >= 2 or _workers(server) == 2)
        family = server.remember()
        assert len(family) >= 4
        os.kill(server.process.pid, signal.SIGKILL)
        assert within(OVER_S, lambda: server.process.returncode is not None and not server.left()), server.left()
    finally:
        for process in server.process.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)


def _workers(server: Server) -> int:
    """Forked workers that have no name yet: children of the engine's process."""
    engines = server.named("EngineCore")
    count = 0
    for process in server.process.family():
        with contextlib.suppress(OSError):
            parent = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
            count += parent in engines
    return count
