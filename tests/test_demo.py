"""The demo from start to end, on a model small enough for a test: the real `vllm serve`, two stages, eight streams."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine


def _demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm_handoff.executor.cli", "demo", "--port", str(port), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_demo_streams_eight_answers_and_leaves_nothing(tiny_llama: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = _demo("--model", str(tiny_llama), "--max-tokens", "12", "--log-dir", str(tmp_path), "--json", str(report))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n> ") == 8
    counts = dict(re.findall(r"^  (\w[\w /]*?) +([\d.]+)$", done.stdout, re.MULTILINE))
    assert int(counts["most rounds in flight at once"]) >= 2
    assert int(counts["handoffs made"]) >= 1
    # A random model may end a text early, but hardly all of them.
    assert 8 < int(counts["tokens"]) <= 8 * 12
    told = json.loads(report.read_text())
    assert told["ok"] and len(told["answers"]) == 8
    assert told["statistics"]["handoffs"] == int(counts["handoffs made"])


def test_demo_says_why_the_server_did_not_start(tiny_llama: Path, tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_bytes((tiny_llama / "config.json").read_bytes().replace(b"LlamaFor", b"NobodyFor"))
    done = _demo("--model", str(broken), "--log-dir", str(tmp_path / "logs"), "--json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    assert not told["ok"] and "NobodyForCausalLM" in told["problems"][0]
    assert "ended with status 1 before it was ready" in done.stderr
    assert "NobodyForCausalLM" in done.stderr
