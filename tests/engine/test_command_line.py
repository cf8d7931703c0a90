"""`vllm serve`, as its users start it: requests over HTTP, then an end that leaves nothing."""

from __future__ import annotations

import ast
import json
import os
import random
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from engines import EXECUTOR, Reference
from requests_and_answers import Answer, Ask, greedy, over_time, random_prompt
from vllm_handoff.executor.server_process import Process, ServerFailedError, ServerProcess

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

# Starting takes 20 s on an idle machine.
READY_S = 150
_PARSER = threading.Lock()
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Server:
    """A server on a free port of this machine, with a folder of its own for temporary files."""

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        # Sockets live there, and a path to one is at most 107 bytes long.
        self.temporary = Path(tempfile.mkdtemp(prefix="serve-", dir="/tmp"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        command = [
            str(Path(sys.executable).with_name("vllm")), "serve", str(model), "--served-model-name", "tiny",
            "--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--enforce-eager",
            "--max-model-len", "512", "--max-num-seqs", "16", "--max-num-batched-tokens", "64",
            "--kv-cache-memory-bytes", str(64 << 20), "--pipeline-parallel-size", "2",
            "--distributed-executor-backend", EXECUTOR, *flags,
        ]  # fmt: skip
        environment = {
            **os.environ,
            "TMPDIR": str(self.temporary),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # For worker classes of these tests.
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }
        self.process = ServerProcess(command, environment, folder / "server.log")
        self.folders: set[str] = set()

    def wait_ready(self) -> None:
        self.process.wait_ready(f"{self.url}/health", READY_S)
        self.folders = {path.name for path in self.temporary.glob("vllm-handoff-*")}

    def leftovers(self) -> list[str]:
        """What the executor has left in file systems."""
        shared = [
            path.name for path in Path("/dev/shm").iterdir() if any(folder in path.name for folder in self.folders)
        ]
        return [path.name for path in self.temporary.glob("vllm-handoff-*")] + shared

    def close(self) -> None:
        self.process.stop(grace=0)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def complete(self, ask: Ask) -> Answer:
        """A completion in one piece."""
        reply = httpx.post(f"{self.url}/v1/completions", json=_body(ask), timeout=60, trust_env=False)
        reply.raise_for_status()
        (choice,) = reply.json()["choices"]
        return Answer(tuple(choice["token_ids"]), choice["finish_reason"], choice["stop_reason"], choice["text"])

    def stream(self, ask: Ask, leave_after: int | None = None) -> Answer:
        """A completion put together from the pieces of its stream, whose connection is closed after `leave_after`."""
        token_ids: list[int] = []
        text, reason, stop = "", None, None
        body = {**_body(ask), "stream": True}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=60, trust_env=False) as reply:
            for line in reply.iter_lines():
                data = line.removeprefix("data: ")
                if not data or data == "[DONE]":
                    continue
                (choice,) = json.loads(data)["choices"]
                token_ids += choice["token_ids"]
                text += choice["text"]
                reason, stop = choice["finish_reason"], choice["stop_reason"]
                if leave_after is not None and len(token_ids) >= leave_after:
                    break
        return Answer(tuple(token_ids), reason, stop, text)

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a counter or gauge over the series whose labels hold `label`."""
        lines = httpx.get(f"{self.url}/metrics", timeout=10, trust_env=False).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{") and label in line)


def _body(ask: Ask) -> dict[str, Any]:
    # Python 3.11's parser counts its depth for all threads together.
    with _PARSER:
        params = ast.literal_eval(ask.params)
    return {"model": "tiny", "prompt": list(ask.prompt), "return_token_ids": True, **params}


@pytest.fixture(scope="module")
def server(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tiny_llama, tmp_path_factory.mktemp("server"))
    try:
        server.wait_ready()
        yield server
    finally:
        server.close()


def _all_at_once(asks: list[Ask], call: Callable[[Ask], Answer]) -> list[Answer]:
    with ThreadPoolExecutor(len(asks)) as pool:
        return list(pool.map(call, asks))


def _asks(seed: int, count: int) -> list[Ask]:
    return [arrival.ask for arrival in over_time(seed, count, longest_prompt=200, most_tokens=40, every=1)]


def test_completions(server: Server, reference: Reference) -> None:
    asks = _asks(seed=91, count=24)
    assert _all_at_once(asks, server.complete) == reference(asks)


def test_streamed_completions(server: Server, reference: Reference) -> None:
    asks = _asks(seed=92, count=24)
    assert _all_at_once(asks, server.stream) == reference(asks)


def test_a_closed_connection_aborts_its_request(server: Server, reference: Reference) -> None:
    before = server.metric("vllm:generation_tokens_total")
    rng = random.Random(93)
    asks = [greedy(random_prompt(rng, 20), 450) for _ in range(6)]
    others = _asks(seed=93, count=6)
    with ThreadPoolExecutor(len(asks) + len(others)) as pool:
        left = [pool.submit(server.stream, ask, leave_after=5) for ask in asks]
        stayed = [pool.submit(server.complete, ask) for ask in others]
    assert [future.result() for future in stayed] == reference(others)
    for future, wanted in zip(left, reference(asks), strict=True):
        found = future.result().token_ids
        assert len(found) >= 5
        assert found == wanted.token_ids[: len(found)]
    _until(lambda: server.metric("vllm:num_requests_running") == 0)
    made = server.metric("vllm:generation_tokens_total") - before
    assert made < sum(len(answer.token_ids) for answer in reference(others + asks)) / 2


def test_idle_processes_use_no_cpu(server: Server) -> None:
    _until(lambda: server.metric("vllm:num_requests_running") == 0)
    family = server.process.family()
    assert len(family) >= 4  # the API server, the engine and two workers at least
    before, began = _cpu_ticks(family), time.monotonic()
    time.sleep(6)
    used = (_cpu_ticks(family) - before) / TICKS_PER_S / (time.monotonic() - began)
    # The aim is 0.02; half of a busy core would be a loop that spins now and then.
    assert used < 0.1


def test_sigterm_ends_everything(server: Server) -> None:
    family = server.process.family()
    assert server.folders
    assert server.process.stop(grace=30) == []
    assert server.process.returncode == 0
    assert not server.process.family() & family
    assert server.leftovers() == []
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port)).close()


def test_a_server_whose_worker_cannot_start(tiny_llama: Path, tmp_path: Path) -> None:
    server = Server(tiny_llama, tmp_path, "--worker-cls", "user_classes.WorkerThatCannotStart")
    try:
        with pytest.raises(ServerFailedError, match="OSError: the disk is on fire"):
            server.wait_ready()
        _until(lambda: not server.process.family())
        assert server.process.returncode not in (0, None)
        assert server.leftovers() == []
        assert 'raise OSError("the disk is on fire")' in server.process.log.read_text()
    finally:
        server.close()


def _until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _cpu_ticks(processes: set[Process]) -> int:
    """Processor time of all these so far, in ticks of the clock."""
    ticks = 0
    for process in processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks
