"""How a running server is: can it make a token, and do its rounds advance?"""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_METRICS_TIMEOUT_S = 5.0
_QUIET = "vllm_handoff_seconds_without_progress"


class NotHealthyError(RuntimeError):
    """The server does not do what a healthy one does. The message is one sentence."""


class NoMetricsError(NotHealthyError):
    """The server answers, and its metrics do not tell of rounds."""


@dataclass(frozen=True)
class Progress:
    """What the server's metrics say of its rounds.

    Attributes:
        completed: rounds completed since the start.
        in_flight: rounds in flight.
        requests: requests that run or wait.
        quiet_s: seconds since the rounds in flight last advanced; of several engines, of that for which it is longest.
    """

    completed: int
    in_flight: int
    requests: int
    quiet_s: float

    @property
    def busy(self) -> bool:
        return bool(self.in_flight or self.requests)


class Server:
    """A client of one server on this machine.

    Args:
        url: its address, such as http://127.0.0.1:8000.
        api_key: sent with requests, if the server wants one.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # A proxy from the environment must not be asked.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._model = ""

    def answers(self) -> bool:
        """Whether the server's /health says yes."""
        try:
            self._get("/health", None, _METRICS_TIMEOUT_S)
        except NotHealthyError:
            return False
        return True

    def make_token(self, timeout: float) -> None:
        """Have one token made.

        Raises:
            NotHealthyError: none came within `timeout` seconds.
        """
        if not self._model:
            models = json.loads(self._get("/v1/models", None, timeout))
            self._model = models["data"][0]["id"]
        # As token ids, so that no tokenizer is needed.
        body = {"model": self._model, "prompt": [1], "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        answer: dict[str, Any] = json.loads(self._get("/v1/completions", body, timeout))
        if not answer.get("usage", {}).get("completion_tokens"):
            raise NotHealthyError(f"{self.url} answered without a token.")

    def progress(self) -> Progress:
        """What the metrics say.

        Raises:
            NotHealthyError: they cannot be had.
            NoMetricsError: they are not there, or not of a server with HandoffExecutor.
        """
        values: dict[str, float] = {}
        for name, value in _SAMPLE.findall(self._get("/metrics", None, _METRICS_TIMEOUT_S)):
            before = values.get(name, 0.0)
            # One sample an engine.
            values[name] = max(before, float(value)) if name == _QUIET else before + float(value)
        if "vllm_handoff_rounds_completed_total" not in values:
            raise NoMetricsError(
                f"{self.url}/metrics says nothing of vllm-handoff: the server runs another executor, or has "
                "--disable-log-stats."
            )
        return Progress(
            int(values["vllm_handoff_rounds_completed_total"]),
            int(values["vllm_handoff_rounds_in_flight"]),
            int(values.get("vllm:num_requests_running", 0) + values.get("vllm:num_requests_waiting", 0)),
            values[_QUIET],
        )

    def _get(self, path: str, body: dict[str, Any] | None, timeout: float) -> str:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, self._headers)
        try:
            with self._opener.open(request, timeout=timeout) as response:
                text: str = response.read().decode(errors="replace")
                return text
        except urllib.error.HTTPError as error:
            kind = NoMetricsError if path == "/metrics" and error.code == 404 else NotHealthyError
            raise kind(f"{self.url}{path} answered {error.code}: {error.read()[:200]!r}") from error
        except (OSError, ValueError) as error:
            # URLError and a timeout are OSErrors.
            raise NotHealthyError(f"{self.url}{path} does not answer: {error}") from error


class ProgressWatch:
    """Judges a server by successive looks at it.

    Args:
        server: the server.
        stall_after: seconds without a completed round, or progress of a stage within one, with work there,
            until that is a stall.
        probe_after: seconds of idleness until a token of our own shows that the engine still works; 0: never.
    """

    def __init__(self, server: Server, stall_after: float, probe_after: float) -> None:
        self._server = server
        self._stall_after = stall_after
        self._probe_after = probe_after
        self._completed = -1
        self._advanced_at = 0.0

    def look(self, now: float) -> str:
        """Look once, at the monotonic time `now`, and return a sentence for a server that is well.

        Raises:
            NotHealthyError: it is not; "alive but not advancing" if only its rounds stand still.
        """
        try:
            progress = self._server.progress()
        except NoMetricsError:
            # Rounds cannot be watched: tokens of our own have to do.
            return self._probe(now) if self._due(now) else "well; rounds cannot be watched without metrics"
        if progress.completed != self._completed:
            if self._completed >= 0 and progress.quiet_s > self._stall_after:
                # Rounds of another engine have advanced.
                raise NotHealthyError(
                    f"alive but not advancing: one of the engines has made no progress for {progress.quiet_s:.0f} s"
                )
            self._completed, self._advanced_at = progress.completed, now
            return f"advancing: {progress.completed} rounds, {progress.in_flight} in flight"
        quiet = now - self._advanced_at
        if progress.in_flight:
            # One round may take long, as the stages' own progress shows.
            quiet = min(quiet, progress.quiet_s)
        if progress.busy and quiet > self._stall_after:
            raise NotHealthyError(
                f"alive but not advancing: {progress.in_flight} rounds in flight, {progress.requests} requests, "
                f"and no progress for {quiet:.0f} s"
            )
        if not progress.busy and self._due(now):
            return self._probe(now)
        return "idle" if not progress.busy else f"working; the last progress was {quiet:.0f} s ago"

    def _due(self, now: float) -> bool:
        return bool(self._probe_after) and now - self._advanced_at > self._probe_after

    def _probe(self, now: float) -> str:
        try:
            self._server.make_token(self._stall_after)
        except NotHealthyError as error:
            raise NotHealthyError(f"alive but not advancing: a token is not made ({error})") from error
        self._advanced_at = now
        return "a token was made"
