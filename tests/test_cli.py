"""The command line: its help, its registry, and what the demo checks before it starts anything."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from vllm_handoff.executor import cli, demo, show_version
from vllm_handoff.executor.demo_streams import Answer, _read


@pytest.mark.parametrize("arguments", [["--help"], *([name, "--help"] for name in cli.COMMANDS)])
def test_every_help_has_examples(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 0
    assert "examples:" in capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(set(cli.COMMANDS) - {"serve"}))
def test_every_command_but_serve_reports_as_json(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    assert "--json" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, key",
    [(["version"], "vllm"), (["simulate", "--load", "4x8+4"], "rows"), (["simulate", "--counts", "2"], "rows")],
)
def test_json_stands_alone_on_standard_output(
    arguments: list[str], key: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[key]


def test_a_report_goes_to_its_file_and_the_text_to_standard_output(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["simulate", "--load", "4x8+4", "--json", str(tmp_path / "report.json")]) == 0
    assert "policy" in capsys.readouterr().out
    assert json.loads((tmp_path / "report.json").read_text())["load"] == "4x8+4"


def test_help_does_not_import_vllm_or_torch() -> None:
    code = (
        "import sys; from vllm_handoff.executor import cli; cli.build_parser(); "
        "sys.exit(bool({'vllm', 'torch'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_version_names_the_remedy_for_an_excluded_plugin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["version"]) == 0
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert cli.main(["version"]) == 1
    assert "add vllm_handoff to it" in capsys.readouterr().err
    monkeypatch.setenv("VLLM_PLUGINS", "another,vllm_handoff")
    assert show_version.plugin_problem() is None


def test_demo_says_in_one_sentence_that_the_port_is_busy(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind((demo.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["demo", "--port", str(port), "--log-dir", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert f"Port {port} cannot be used" in error and "--port" in error
    assert error.count("\n") == 1


def test_demo_refuses_what_it_cannot_run() -> None:
    with pytest.raises(demo.DemoError, match="GiB"):
        demo.check_memory(1 << 60)
    with pytest.raises(demo.DemoError, match="Port"):
        demo.check_port(1 << 20)
    assert demo.choose_device("0.32.0+cpu") is demo.CPU


def test_demo_command_is_what_the_readme_says(tmp_path: Path) -> None:
    command = " ".join(demo.serve_command(tmp_path, 8000, demo.CPU))
    assert f"serve {tmp_path} --pipeline-parallel-size 2 --distributed-executor-backend {demo.EXECUTOR}" in command


def _statistics(folder: Path, **counts: int) -> Path:
    path = folder / "statistics.json"
    path.write_text(json.dumps({"rounds": 9, "max_in_flight": 2, "handoffs": 5, "handoffs_not_needed": 4, **counts}))
    return path


def test_summary_is_content_with_a_good_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.summarise([Answer("p", "text", 6)], 2.0, _statistics(tmp_path)) == []
    words = capsys.readouterr().out.split()
    assert words[-2:] == ["tokens/s", "3.0"]


@pytest.mark.parametrize(
    "counts, complaint",
    [({"max_in_flight": 1}, "never two rounds"), ({"handoffs": 0}, "No sampled tokens")],
)
def test_summary_complains(tmp_path: Path, counts: dict[str, int], complaint: str) -> None:
    (problem,) = demo.summarise([Answer("p", "text", 6)], 2.0, _statistics(tmp_path, **counts))
    assert complaint in problem


def test_summary_complains_without_statistics(tmp_path: Path) -> None:
    (problem,) = demo.summarise([Answer("p", "text", 6)], 2.0, tmp_path / "none")
    assert "statistics" in problem


@pytest.mark.parametrize(
    "events, tokens, error",
    [
        (['{"choices":[{"text":"Pa"}]}', '{"choices":[],"usage":{"completion_tokens":1}}', "[DONE]"], 1, ""),
        (['{"choices":[{"text":"Pa"}]}'], 0, "broke off"),
        (['{"error":{"message":"engine dead"}}'], 0, "engine dead"),
        (["[DONE]"], 0, "no tokens"),
    ],
)
def test_a_stream_is_read_to_its_end(events: list[str], tokens: int, error: str) -> None:
    async def lines() -> AsyncIterator[bytes]:
        for event in events:
            yield f"data: {event}\n".encode()
            yield b"\n"

    answer = Answer("p")
    asyncio.run(_read(lines(), answer))
    assert answer.tokens == tokens
    assert error in answer.error and bool(error) == bool(answer.error)
