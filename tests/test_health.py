"""What `serve` and `check` make of a server, without one: progress judged, arguments read, systemd told."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from vllm_handoff.executor import cli, serve
from vllm_handoff.executor.health import NoMetricsError, NotHealthyError, Progress, ProgressWatch, Server
from vllm_handoff.executor.sd_notify import Notifier

METRICS = """\
# HELP vllm_handoff_rounds_completed_total Rounds whose output has come back.
vllm_handoff_rounds_completed_total{engine="0",model_name="a b"} 12.0
vllm_handoff_rounds_in_flight{engine="0",model_name="a b"} 3.0
vllm_handoff_seconds_without_progress{engine="0",model_name="a b"} 1.5
vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_waiting{engine="0"} 5.0
"""


class FakeServer(Server):
    """Answers with what a test sets."""

    def __init__(self) -> None:
        super().__init__("http://nowhere")
        self.now = Progress(0, 0, 0, 0.0)
        self.tokens = 0
        self.stuck = False

    def progress(self) -> Progress:
        return self.now

    def make_token(self, timeout: float) -> None:
        if self.stuck:
            raise NotHealthyError("no token")
        self.tokens += 1


def test_metrics_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("http://nowhere/")
    monkeypatch.setattr(server, "_get", lambda *_: METRICS)
    assert server.progress() == Progress(completed=12, in_flight=3, requests=7, quiet_s=1.5)
    monkeypatch.setattr(server, "_get", lambda *_: "vllm:num_requests_running 0.0\n")
    with pytest.raises(NotHealthyError, match="another executor"):
        server.progress()


def test_one_of_several_engines_that_stands_still_is_a_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("http://nowhere/")
    watch = ProgressWatch(server, stall_after=30, probe_after=30)

    def look(now: float, completed: int, *quiet: float) -> str:
        text = METRICS.replace(" 12.0", f" {completed}")
        text += "".join(
            f'vllm_handoff_seconds_without_progress{{engine="{index}"}} {value}\n'
            for index, value in enumerate(quiet, 1)
        )
        monkeypatch.setattr(server, "_get", lambda *_: text)
        return watch.look(now)

    # Long rounds of several engines do not add up.
    for now in range(5):
        assert "advancing" in look(now, 12 + now, 20.0, 20.0)
    with pytest.raises(NotHealthyError, match="alive but not advancing: one of the engines .* for 31 s"):
        look(6, 30, 31.0, 0.0)
    assert "advancing" in look(7, 31, 0.0, 0.0)


def test_rounds_that_stand_still_are_a_stall_only_after_a_while() -> None:
    server = FakeServer()
    watch = ProgressWatch(server, stall_after=30, probe_after=30)
    server.now = Progress(5, 2, 1, 0)
    assert "advancing" in watch.look(0)
    server.now = Progress(5, 2, 1, 30)
    assert "working" in watch.look(30)
    server.now = Progress(5, 2, 1, 31)
    with pytest.raises(NotHealthyError, match="alive but not advancing: 2 rounds in flight"):
        watch.look(31)
    server.now = Progress(6, 2, 1, 0)
    assert "advancing" in watch.look(32)


def test_a_long_round_is_no_stall_while_its_stages_advance() -> None:
    server = FakeServer()
    watch = ProgressWatch(server, stall_after=30, probe_after=30)
    for now in range(0, 200, 10):
        server.now = Progress(5, 2, 1, 2.0)
        assert "advancing" in (said := watch.look(now)) or "working" in said
    server.now = Progress(5, 2, 1, 32.0)
    with pytest.raises(NotHealthyError, match="no progress for 32 s"):
        watch.look(222)


def test_without_metrics_tokens_have_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()

    def progress() -> Progress:
        raise NoMetricsError("none")

    monkeypatch.setattr(server, "progress", progress)
    watch = ProgressWatch(server, stall_after=30, probe_after=30)
    for now in (100, 110, 131):
        watch.look(now)
    assert server.tokens == 2
    server.stuck = True
    with pytest.raises(NotHealthyError, match="alive but not advancing"):
        watch.look(162)


def test_requests_without_rounds_are_a_stall_too() -> None:
    server = FakeServer()
    watch = ProgressWatch(server, stall_after=30, probe_after=30)
    watch.look(0)
    server.now = Progress(0, 0, 4, 0)
    with pytest.raises(NotHealthyError, match="0 rounds in flight, 4 requests"):
        watch.look(31)


def test_an_idle_server_proves_itself_with_a_token_now_and_then() -> None:
    server = FakeServer()
    watch = ProgressWatch(server, stall_after=30, probe_after=30)
    watch.look(0)
    assert (watch.look(30), server.tokens) == ("idle", 0)
    assert "a token was made" in watch.look(31) and server.tokens == 1
    assert watch.look(61) == "idle"
    server.stuck = True
    with pytest.raises(NotHealthyError, match="alive but not advancing: a token is not made"):
        watch.look(62)


@pytest.mark.parametrize(
    "arguments, url",
    [
        (["m"], "http://127.0.0.1:8000"),
        (["m", "--port", "1", "--port=2"], "http://127.0.0.1:2"),
        (["m", "--host", "0.0.0.0", "--port", "9"], "http://127.0.0.1:9"),
        (["m", "--host=::1", "--ssl-certfile", "c"], "https://[::1]:8000"),
    ],
)
def test_where_the_server_is(arguments: list[str], url: str) -> None:
    assert serve.server_url(arguments) == url


def test_what_is_missing_is_filled_in_and_what_is_given_is_kept() -> None:
    command = " ".join(serve.serve_command(["m", "--pipeline-parallel-size", "2"]))
    assert command.endswith(
        f"serve m --pipeline-parallel-size 2 --distributed-executor-backend {serve.EXECUTOR} --shutdown-timeout 60"
    )
    given = ["m", "--distributed-executor-backend=mp", "--shutdown-timeout", "5"]
    assert serve.serve_command(given)[-4:] == given


def test_serve_without_a_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve"]) == 2
    assert "at least a model" in capsys.readouterr().err


def test_systemd_is_told_and_children_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "30000000")
        monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
        notifier = Notifier()
        assert notifier.watchdog_s == 30 and "NOTIFY_SOCKET" not in os.environ
        notifier.ready("well")
        notifier.alive("still well")
        assert systemd.recv(1000) == b"READY=1\nSTATUS=well"
        assert systemd.recv(1000) == b"WATCHDOG=1\nSTATUS=still well"
    # Nobody listens any more: no error.
    notifier.alive("still well")


def test_a_watchdog_meant_for_another_process_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "30000000")
    monkeypatch.setenv("WATCHDOG_PID", "1")
    assert Notifier().watchdog_s is None
