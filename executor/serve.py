"""Run `vllm serve` with HandoffExecutor as a service: ready when it is, watched, and an end that tells the truth.

Everything from MODEL on is given to `vllm serve`, with
--distributed-executor-backend and --shutdown-timeout filled in if they are missing.

  ready      told to systemd (Type=notify) only after the server has made its first token
  watched    systemd's watchdog is fed as long as rounds advance; an idle server makes
             a token now and then. "alive but not advancing" is logged and shown by
             `systemctl status`, and the watchdog goes hungry
  the end    SIGTERM lets requests finish (--shutdown-timeout), a second one does not;
             a server that ends by itself is a failure, so that Restart=on-failure restarts it

Outside systemd it does the same without telling anybody; --give-up-after then ends
a server that stands still, for whatever restarts it.

examples:
  vllm-handoff serve MODEL --pipeline-parallel-size 2 --port 8000
  vllm-handoff serve --give-up-after 120 MODEL --pipeline-parallel-size 2
  vllm-handoff serve --stall-after 60 -- --config /etc/vllm-handoff/serve.yaml
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from vllm_handoff.executor.health import NotHealthyError, ProgressWatch, Server
from vllm_handoff.executor.sd_notify import Notifier
from vllm_handoff.executor.server_process import family_of

EXECUTOR = "vllm_handoff.executor.HandoffExecutor"
_DRAIN_S = 60
_LOOK_EVERY_S = 10.0
_TICK_S = 0.25
_SELF_CHECK_S = 120.0
# What processes of an ended server get to end by themselves.
_FAMILY_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--stall-after",
        type=float,
        default=30,
        metavar="S",
        help="seconds without progress, with work there, until that is a stall (default: 30)",
    )
    parser.add_argument(
        "--probe-after",
        type=float,
        default=30,
        metavar="S",
        help="seconds of idleness until a token shows that the engine works; 0: never, if it may sleep (default: 30)",
    )
    parser.add_argument(
        "--give-up-after",
        type=float,
        default=0,
        metavar="S",
        help="end a server that has not been well for so many seconds; 0 leaves that to the watchdog (default: 0)",
    )
    parser.add_argument("--url", help="where to reach the server, if --host and --port do not say it")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="MODEL ...", help="arguments of `vllm serve`")


def run(args: argparse.Namespace) -> int:
    given = args.arguments[1:] if args.arguments[:1] == ["--"] else args.arguments
    if not given:
        print("error: give the arguments of `vllm serve`: at least a model.", file=sys.stderr)
        return 2
    url = args.url or server_url(given)
    server = Server(url, option(given, "--api-key") or os.environ.get("VLLM_API_KEY"))
    watch = ProgressWatch(server, args.stall_after, args.probe_after)
    return Service(serve_command(given), server, watch, Notifier(), args.give_up_after).run()


def option(arguments: list[str], name: str) -> str | None:
    """The value of `--name value` or `--name=value`, the last one given."""
    value = None
    for index, argument in enumerate(arguments):
        if argument.startswith(f"{name}="):
            value = argument.partition("=")[2]
        elif argument == name and index + 1 < len(arguments):
            value = arguments[index + 1]
    return value


def server_url(arguments: list[str]) -> str:
    """Where the server of these arguments is reached from this machine."""
    host = option(arguments, "--host") or "127.0.0.1"
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    scheme = "https" if option(arguments, "--ssl-certfile") else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{option(arguments, '--port') or 8000}"


def serve_command(arguments: list[str]) -> list[str]:
    """`vllm serve` of this Python's environment, with our executor and time to drain."""
    vllm = Path(sys.executable).with_name("vllm")
    command = [str(vllm)] if vllm.is_file() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    command += ["serve", *arguments]
    for name, value in (("--distributed-executor-backend", EXECUTOR), ("--shutdown-timeout", str(_DRAIN_S))):
        if option(arguments, name) is None:
            command += [name, value]
    return command


class Service:
    """One `vllm serve`, from its start to its end."""

    def __init__(
        self, command: list[str], server: Server, watch: ProgressWatch, notifier: Notifier, give_up_after: float
    ) -> None:
        self._command = command
        self._server = server
        self._watch = watch
        self._notifier = notifier
        self._give_up_after = give_up_after
        self._asked_to_stop = False
        self._last_status = ""

    def run(self) -> int:
        """Run until the server ends, and return this process's exit status."""
        # A session of its own: Ctrl-C would reach it twice, and to vLLM the second means at once;
        # and by its session whatever it leaves behind can be found.
        child = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, start_new_session=True)

        def stop(number: int, frame: FrameType | None) -> None:
            first, self._asked_to_stop = not self._asked_to_stop, True
            if first:
                self._notifier.stopping("stopping: requests may finish")
            child.send_signal(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        try:
            if self._become_ready(child):
                self._stay(child)
            return self._end(child)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            _end_family(child.pid)

    def _running(self, child: subprocess.Popen) -> bool:
        return child.poll() is None and not self._asked_to_stop

    def _become_ready(self, child: subprocess.Popen) -> bool:
        """Wait for the first token; False if the server ends before."""
        self._notifier.status("starting: loading the model")
        while not self._server.answers():
            if not self._running(child):
                return False
            time.sleep(_TICK_S)
        self._say("self-check: waiting for the first token")
        try:
            self._server.make_token(_SELF_CHECK_S)
        except NotHealthyError as error:
            if self._running(child):
                self._say(f"the self-check failed: {error}", error=True)
                child.terminate()
            return False
        self._say("ready: the first token was made")
        self._notifier.ready("ready: the first token was made")
        return True

    def _stay(self, child: subprocess.Popen) -> None:
        """Look at the server now and then until it ends or is asked to."""
        every = _LOOK_EVERY_S
        if self._notifier.watchdog_s is not None:
            every = min(every, self._notifier.watchdog_s / 3)
        next_look = well_at = time.monotonic()
        while self._running(child):
            now = time.monotonic()
            if now >= next_look:
                next_look = now + every
                if self._look(now):
                    well_at = time.monotonic()
                elif self._give_up_after and now - well_at > self._give_up_after:
                    self._say(f"not well for {now - well_at:.0f} s: the server is ended", error=True)
                    child.kill()
                    return
            time.sleep(_TICK_S)

    def _look(self, now: float) -> bool:
        try:
            self._notifier.alive(self._watch.look(now))
        except NotHealthyError as error:
            self._notifier.status(str(error))
            self._say(str(error), error=True)
            return False
        return True

    def _end(self, child: subprocess.Popen) -> int:
        status = child.wait()
        if self._asked_to_stop:
            return 0 if status in (0, -signal.SIGTERM, -signal.SIGINT) else _positive(status)
        self._notifier.status(f"the server ended by itself (status {status})")
        self._say(f"the server ended by itself with status {status}, which is a failure", error=True)
        # A server that nobody asked to end has failed, whatever it says.
        return _positive(status) or 1

    def _say(self, text: str, error: bool = False) -> None:
        # The same news once: a stall is looked at every few seconds.
        if text.partition(":")[0] != self._last_status:
            print(f"vllm-handoff serve: {'error: ' if error else ''}{text}", file=sys.stderr, flush=True)
        self._last_status = text.partition(":")[0]


def _end_family(pid: int) -> None:
    """Kill what an ended server has left: an engine that is stopped, or stuck, cannot see its front end go."""
    deadline = time.monotonic() + _FAMILY_S
    while left := family_of(pid):
        if time.monotonic() > deadline:
            for process in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        time.sleep(_TICK_S)


def _positive(status: int) -> int:
    return 128 - status if status < 0 else status
