"""What deploy/ and the tools around it promise, as far as it can be checked without starting a server."""

from __future__ import annotations

import configparser
import dataclasses
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import check_dashboard
import licences
import run_dockerfiles
from vllm_handoff.executor import board, metrics, serve
from vllm_handoff.executor.board import Board, WorkerCounts
from vllm_handoff.executor.stats import RoundStats
from vllm_handoff.scheduler_ext.settings import HandoffSettings

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of all series that the collector serves."""
    monkeypatch.setattr(board.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / "vllm-handoff-abc"
    folder.mkdir()
    Board(board.worker_board(str(folder), 0), WorkerCounts(since_ns=time.monotonic_ns()))
    Board(folder / board.ENGINE_BOARD, RoundStats())
    board.announce(str(folder), "1")
    collector = metrics.HandoffCollector("1", 1, 1, {"model_name": "m", "engine": "0"})
    return {sample.name for metric in collector.collect() for sample in metric.samples}


def test_the_dashboard_asks_for_series_that_exist(served: set[str]) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "vllm-handoff.json").read_text())
    queries = [query for _, query in check_dashboard.queries(dashboard)]
    asked = {name for query in queries for name in re.findall(r"vllm_handoff_\w+", query)}
    assert asked and asked <= served
    assert not any("$" in query for query in queries)
    assert all(panel["description"] for panel in dashboard["panels"])


def test_alerts_ask_for_series_that_exist(served: set[str]) -> None:
    rules = yaml.safe_load((DEPLOY / "grafana" / "alerts.yml").read_text())
    asked = set(re.findall(r"vllm_handoff_\w+", json.dumps(rules)))
    assert asked and asked <= served


def test_the_documentation_lists_the_metrics_that_are_served(served: set[str]) -> None:
    section = (ROOT / "docs" / "deployment.md").read_text().partition("## Metrics")[2].partition("## How")[0]
    documented = {
        name for line in section.splitlines() if line.startswith("| `") for name in re.findall(r"`(\w+)`", line)
    }
    names = {re.sub(r"_(count|sum)$", "", name.removeprefix("vllm_handoff_")) for name in served}
    assert names <= documented


@pytest.mark.parametrize("page", ["README.md", "docs/settings.md"])
def test_every_setting_is_documented(page: str) -> None:
    documented = set(re.findall(r"^\| `(\w+)` \|", (ROOT / page).read_text(), re.MULTILINE))
    assert {field.name for field in dataclasses.fields(HandoffSettings)} <= documented


@pytest.mark.parametrize(
    "answer, problem",
    [
        ({"status": "success", "data": {"result": [{"value": [0, "NaN"]}, {"value": [0, "1"]}]}}, None),
        ({"status": "success", "data": {"result": [{"value": [0, "NaN"]}]}}, "NaN"),
        ({"status": "success", "data": {"result": []}}, "no data"),
        ({"status": "error", "error": "parse error"}, "parse error"),
    ],
)
def test_an_empty_panel_is_noticed(answer: dict[str, Any], problem: str | None) -> None:
    found = check_dashboard.problem_of(answer)
    assert (found is None) if problem is None else (found is not None and problem in found)


def test_services_wait_longer_than_vllm_drains() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(DEPLOY / "systemd" / "vllm-handoff.service")
    assert int(unit["Service"]["TimeoutStopSec"]) > serve._DRAIN_S
    # A look every third of it, and a stall is told before the watchdog acts.
    assert int(unit["Service"]["WatchdogSec"]) > 30 and unit["Service"]["Type"] == "notify"
    compose = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())
    assert compose["services"]["vllm"]["stop_grace_period"] == "2m"
    assert serve._DRAIN_S < 120 and compose["services"]["vllm"]["restart"] == "on-failure"


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.cpu"])
def test_images_run_as_nobody_special_and_check_their_health_by_a_token(name: str) -> None:
    found = run_dockerfiles.instructions((DEPLOY / "docker" / name).read_text())
    last = dict(found[max(n for n, (word, _) in enumerate(found) if word == "FROM") :])
    assert last["USER"] not in ("0", "root", "0:0") and '"vllm-handoff", "check"' in last["HEALTHCHECK"]
    assert sum(word == "FROM" for word, _ in found) == 2
    # Comments and continued lines are taken out.
    assert not any(word.startswith("#") or "\\" in rest for word, rest in found)


def test_the_compose_file_asks_for_gpus_and_room() -> None:
    service = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())["services"]["vllm"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 2, "capabilities": ["gpu"]}
    assert service["shm_size"] == "2gb" and {"memlock", "nofile"} <= set(service["ulimits"])


def test_installing_keeps_settings_and_uninstalling_takes_the_unit_away(tmp_path: Path) -> None:
    def run(command: str) -> None:
        env = {"DESTDIR": str(tmp_path), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        subprocess.run(["bash", str(DEPLOY / "systemd" / "install.sh"), command], env=env, check=True)

    run("install")
    settings = tmp_path / "etc/vllm-handoff/server.env"
    assert settings.stat().st_mode & 0o777 == 0o600
    settings.write_text("MODEL=mine\n")
    run("install")
    assert settings.read_text() == "MODEL=mine\n"
    run("uninstall")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [settings]


def test_every_dependency_has_a_licence() -> None:
    dists = licences.closure(["cpu"])
    assert {"msgspec", "pyzmq", "torch"} <= {dist.name for dist in dists}
    assert licences.table(dists)[1] == []
    # On the page too. A torch from PyPI brings CUDA's libraries along; those are not in the exact versions.
    exact = {licences._normal(line.partition("==")[0]) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    page = (ROOT / "docs" / "licences.md").read_text()
    missing = [
        d.name for d in dists if licences._normal(d.name) in exact and f"| {d.name} | {_public(d.version)}" not in page
    ]
    assert not missing, f"python tools/licences.py --page >docs/licences.md; missing: {missing}"


def _public(version: str) -> str:
    return version.partition("+")[0]


@pytest.mark.parametrize(
    "tool", ["check_dashboard.py", "check_release.py", "licences.py", "run_dockerfiles.py", "run_unit.py"]
)
def test_tools_explain_themselves(tool: str) -> None:
    command = [sys.executable, str(ROOT / "tools" / tool), "--help"]
    assert "examples:" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
