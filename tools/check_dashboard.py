"""Run every query of the Grafana dashboard against a real Prometheus that scrapes a real server under load.

Starts a server on the CPU (two stages, a tiny model), a Prometheus (Debian: apt
install prometheus) and a load, all on 127.0.0.1, for about a minute, and ends them.
The status is 1 if a query fails, returns nothing, or returns nothing but NaN.

examples:
  python tools/check_dashboard.py
  python tools/check_dashboard.py --url http://127.0.0.1:8000     a server that runs already
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from vllm_handoff.executor import demo
from vllm_handoff.executor.health import NotHealthyError, Server
from vllm_handoff.executor.server_process import ServerProcess

ROOT = Path(__file__).resolve().parents[1]
GRAFANA = ROOT / "deploy" / "grafana"
LOAD_S = 40
# What Grafana fills in.
VARIABLES = {"$__rate_interval": "20s", "$model": ".*"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def get_json(url: str) -> Any:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=10) as response:
        return json.load(response)


def queries(dashboard: dict[str, Any]) -> list[tuple[str, str]]:
    """(panel's title, query) of all panels, as Prometheus takes them."""
    found = []
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for name, value in VARIABLES.items():
                query = query.replace(name, value)
            found.append((panel["title"], query))
    return found


def start_prometheus(target: str, folder: Path, port: int) -> subprocess.Popen:
    """A Prometheus with the project's own configuration, pointed at `target`."""
    config = (GRAFANA / "prometheus.yml").read_text()
    config = config.replace("127.0.0.1:8000", target).replace("interval: 5s", "interval: 2s")
    (folder / "prometheus.yml").write_text(config)
    shutil.copy(GRAFANA / "alerts.yml", folder)
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--storage.tsdb.retention.size=64MB", "--log.level=error"]
    return subprocess.Popen(command, env={**os.environ, "GOMAXPROCS": "1", "GOMEMLIMIT": "256MiB"})


def load(url: str, seconds: float) -> None:
    """Requests that come and go, so that there are busy and quiet moments."""
    server = Server(url)
    server.make_token(30)

    def client(index: int) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            body = {"model": server._model, "prompt": [5 + index], "max_tokens": 20 + 10 * index, "ignore_eos": True}
            try:
                server._get("/v1/completions", body, 60)
            except NotHealthyError as error:
                print(f"load: {error}", file=sys.stderr)
                return
            time.sleep(0.5)

    threads = [threading.Thread(target=client, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def problem_of(answer: dict[str, Any]) -> str | None:
    """What is wrong with Prometheus's answer to a query; None if it holds a number."""
    if answer.get("status") != "success":
        return str(answer.get("error", answer))
    values = [float(series["value"][1]) for series in answer["data"]["result"]]
    if not values:
        return "no data"
    return "nothing but NaN" if all(math.isnan(value) for value in values) else None


def check(url: str, folder: Path) -> int:
    """Check the dashboard against the server at `url`; the number of queries without data."""
    port = free_port()
    prometheus = start_prometheus(url.removeprefix("http://"), folder, port)
    try:
        load(url, LOAD_S)
        bad = 0
        for title, query in queries(json.loads((GRAFANA / "vllm-handoff.json").read_text())):
            address = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
            try:
                answer = get_json(address)
            except OSError as error:
                answer = {"error": str(error)}
            problem = problem_of(answer)
            bad += problem is not None
            value = problem or ", ".join(f"{float(s['value'][1]):.4g}" for s in answer["data"]["result"])
            print(f"{'BAD' if problem else 'ok '}  {title}: {value}\n       {query}")
        return bad
    finally:
        prometheus.terminate()
        prometheus.wait(20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a server that runs already")
    args = parser.parse_args()
    if shutil.which("prometheus") is None:
        print("error: Prometheus is missing: install it (on Debian: sudo apt install prometheus).", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory(prefix="vllm-handoff-dashboard-") as name:
        folder = Path(name)
        if args.url:
            bad = check(args.url, folder)
        else:
            port = free_port()
            command = demo.serve_command(demo.get_model("tiny-llama"), port, demo.CPU)
            env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
            server = ServerProcess(command, {**env, **demo.CPU.env}, folder / "server.log")
            try:
                server.wait_ready(f"http://127.0.0.1:{port}/health", 300)
                bad = check(f"http://127.0.0.1:{port}", folder)
            finally:
                server.stop()
    print(f"\n{bad} queries without data." if bad else "\nEvery query returns data.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
