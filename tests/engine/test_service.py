"""`vllm-handoff serve` around a real server on the CPU, with a socket in the place of systemd's."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_handoff.executor.server_process import family_of

pytestmark = pytest.mark.engine

STARTUP_S = 180


class Systemd:
    """A service under a stand-in for systemd: its messages, its processes, its end."""

    def __init__(self, model: Path, folder: Path, ours: tuple[str, ...] = (), vllms: tuple[str, ...] = ()) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(folder / "notify"))
        self.messages: list[str] = []
        self.log = folder / "log"
        command = [sys.executable, "-m", "vllm_handoff.executor.cli", "serve", "--stall-after", "4", "--probe-after"]
        command += [
            "1",
            *ours,
            str(model),
            *vllms,
            "--pipeline-parallel-size",
            "2",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        command += ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(64 << 20), "--enforce-eager"]
        command += ["--dtype", "float32", "--shutdown-timeout", "10"]
        env = {**os.environ, "NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "3000000"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_for(self, pattern: str, seconds: float) -> str:
        """The next message that matches."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                message = self._socket.recv(4096).decode()
            except TimeoutError:
                break
            self.messages.append(message)
            if re.search(pattern, message):
                return message
        words = self.log.read_text(errors="replace")[-3000:]
        raise AssertionError(f"no message {pattern!r} within {seconds} s; got {self.messages}\n{words}")

    def collect(self, seconds: float) -> list[str]:
        """The messages of the next seconds."""
        found, deadline = [], time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                found.append(self._socket.recv(4096).decode())
            except TimeoutError:
                break
        return found

    def named(self, name: str) -> list[int]:
        """Processes of the service whose command line holds `name`."""
        found = []
        for process in family_of(self.process.pid):
            try:
                line = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if name in line:
                found.append(process.pid)
        return found

    def end(self) -> None:
        for process in family_of(self.process.pid):
            os.kill(process.pid, signal.SIGKILL)
        self.process.wait()
        self._socket.close()


@pytest.fixture
def service(tiny_llama: Path, tmp_path: Path) -> Iterator[Systemd]:
    systemd = Systemd(tiny_llama, tmp_path)
    try:
        systemd.wait_for("READY=1", STARTUP_S)
        yield systemd
    finally:
        systemd.end()


def test_ready_watched_and_stopped(service: Systemd) -> None:
    # Ready came after the self-check's token, not with the server's /health.
    # The server writes its own lines when it likes.
    deadline = time.monotonic() + 10
    while "POST /v1/completions" not in (log := service.log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert log.index("waiting for the first token") < log.index("POST /v1/completions") < log.index("ready: the first")
    service.wait_for("WATCHDOG=1", 10)
    # An engine that is stopped: the server is alive, the watchdog goes hungry.
    (engine,) = service.named("EngineCore")
    os.kill(engine, signal.SIGSTOP)
    service.wait_for("^STATUS=alive but not advancing", 30)
    assert not [message for message in service.collect(6) if "WATCHDOG=1" in message]
    os.kill(engine, signal.SIGCONT)
    service.wait_for("WATCHDOG=1", 30)
    service.process.send_signal(signal.SIGTERM)
    service.wait_for("STOPPING=1", 5)
    assert service.process.wait(40) == 0


def test_a_server_that_stands_still_is_ended_and_leaves_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    # There are no metrics of rounds: tokens have to do.
    options = ("--api-server-count", "2", "--disable-log-stats")
    service = Systemd(tiny_llama, tmp_path, ours=("--give-up-after", "6"), vllms=options)
    try:
        service.wait_for("READY=1", STARTUP_S)
        service.wait_for("(?s)WATCHDOG=1.*a token was made", 10)
        family = family_of(service.process.pid)
        (engine,) = service.named("EngineCore")
        os.kill(engine, signal.SIGSTOP)
        service.wait_for("^STATUS=alive but not advancing: a token is not made", 20)
        assert service.process.wait(60) not in (0, None)
        assert "the server is ended" in service.log.read_text()
        assert not family & family_of(service.process.pid, family)
    finally:
        service.end()


def test_a_stopped_worker_ends_the_service_with_a_failure(service: Systemd) -> None:
    workers = service.named("Worker")
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGSTOP)
    assert service.process.wait(60) not in (0, None)
    assert "which is a failure" in service.log.read_text()
    # It was noticed, not waited for: the watchdog was not fed by a dead engine.
    assert len([message for message in service.collect(1) if "WATCHDOG=1" in message]) <= 12
