"""The harness as users run it: a short run with one kill, and a planted error that it has to find."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(240)]

COMMAND = [sys.executable, "-m", "vllm_handoff.executor.cli", "stress", "--seed", "1"]


def run(folder: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    """Exit status, output and report of a run."""
    report = folder / "report.json"
    done = subprocess.run(
        [*COMMAND, "--json", str(report), "--logs", str(folder / "logs"), *options],
        cwd=folder, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert report.exists(), done.stdout + done.stderr[-3000:]
    return done.returncode, done.stdout, json.loads(report.read_text())


def test_a_short_run_with_one_kill(tmp_path: Path) -> None:
    load = ("--rate", "60", "--kv-tokens", "1500", "--structured", "0.1")
    status, output, report = run(
        tmp_path, "--duration", "50", "--faults", "kill", "none", "--fault-after", "2", "4", *load
    )
    assert status == 0, output
    assert report["problems"] == [] and report["leaks"] == []
    assert report["faults"]["kill"]["injected"] == report["faults"]["kill"]["detected"] == 1
    assert report["answered"] > 30 and report["left"] > 3 and report["tokens"] > 1000 and report["handoffs"] > 100
    assert "answered, and right" in output


def test_two_tokens_swapped_in_the_engine_are_found_and_the_case_shrinks(tmp_path: Path) -> None:
    status, output, report = run(tmp_path, "--duration", "40", "--plant", "swapped", "--shrink", "12")
    assert status == 1
    assert report["problems"][0]["kind"] == "swapped", output
    assert "stress-case-1.json" in output and "PROBLEM (swapped): request" in output
    case = json.loads((tmp_path / "stress-case-1.json").read_text())
    assert case["numbers"] and case == report["smallest_case"]
