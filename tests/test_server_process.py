"""Starting, watching and stopping a server, against small programs that misbehave in every way that matters."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_handoff.executor.server_process import ServerFailedError, ServerProcess

HTTP = "import sys, http.server as h; h.test(h.SimpleHTTPRequestHandler, h.ThreadingHTTPServer, port=int(sys.argv[1]))"
# A child that leaves the session, as daemons do; its parent stays until told to end.
CHILD_LEAVES = """
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(600)
time.sleep(600)
"""
# An orphan: its parent is gone before anybody looks.
ORPHAN = "import os, time\nif os.fork() == 0: time.sleep(600)\ntime.sleep(1)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"

LOG = """
print("(Worker pid=7) ERROR 01-31 12:00:00 [core.py:1] ValueError: the cause")
print("(Worker pid=7)   File x.py")
print("(EngineCore pid=1) ERROR 01-31 12:00:01 [core.py:1] WorkerStartError: no start: ValueError: the cause")
print("ValueError: the cause")
for i in range(30): print("noise", i)
"""

Start = Callable[..., ServerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    servers = []

    def make(code: str, *args: str) -> ServerProcess:
        servers.append(ServerProcess([sys.executable, "-c", code, *args], dict(os.environ), tmp_path / "log"))
        return servers[-1]

    yield make
    for server in servers:
        server.stop(grace=0)


def _until(condition: Callable[[], bool], seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_ready_then_stopped(start: Start) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = start(HTTP, str(port))
    ticks: list[float] = []
    assert server.wait_ready(f"http://127.0.0.1:{port}/", 20, ticks.append) < 20
    assert server.stop() == []
    assert server.family() == set()
    assert server.stop() == []


def test_a_server_that_dies_is_noticed_at_once_with_its_last_words(start: Start) -> None:
    server = start("print('the cause'); raise SystemExit(3)")
    began = time.monotonic()
    with pytest.raises(ServerFailedError, match=r"status 3(.|\n)*the cause"):
        server.wait_ready("http://127.0.0.1:9/", 60)
    assert time.monotonic() - began < 10


def test_of_a_long_log_the_errors_are_shown_once_and_in_order(start: Start) -> None:
    server = start(LOG)
    _until(lambda: "noise 29" in server.log.read_text())
    assert server.last_words() == "  | ValueError: the cause\n  | WorkerStartError: no start: ValueError: the cause"


def test_a_server_that_never_answers_is_given_up(start: Start) -> None:
    server = start("print('busy', flush=True); import time; time.sleep(600)")
    with pytest.raises(ServerFailedError, match=r"not ready after 1 s"):
        server.wait_ready("http://127.0.0.1:9/", 1)


def test_a_deaf_server_is_killed_and_reported(start: Start) -> None:
    server = start(DEAF)
    _until(lambda: "deaf" in server.last_words())
    (problem,) = server.stop(grace=0.5)
    assert "was killed" in problem
    assert server.family() == set()


@pytest.mark.parametrize("code", [CHILD_LEAVES, ORPHAN], ids=["left the session", "lost its parent"])
def test_processes_left_behind_are_found_killed_and_reported(start: Start, code: str) -> None:
    server = start(code)
    _until(lambda: len(server.family()) == 2)
    if code is ORPHAN:
        _until(lambda: len(server.family()) == 1)
    (problem,) = server.stop()
    assert "left processes running" in problem
    assert server.family() == set()
