"""`vllm-handoff doctor`: what it finds here, and what it says of machines that are not as they should be."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest

from vllm_handoff.executor import cli, doctor, doctor_gpus, doctor_model, doctor_system
from vllm_handoff.executor.doctor_system import Check


def test_this_machine_is_fit(capsys: pytest.CaptureFixture[str], tiny_llama: Path) -> None:
    assert cli.main(["doctor", "--model", str(tiny_llama)]) == 0
    out = capsys.readouterr().out
    assert "4 layers as 2 + 2" in out and "0 to mend" in out


def test_json_and_status_of_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    assert cli.main(["doctor", "--json", "--model", str(tmp_path)]) == 1
    report = json.loads(capsys.readouterr().out)
    failed = {check["name"] for check in report["checks"] if check["level"] == "fail"}
    assert not report["ok"] and failed == {"plugin", "model"}


def test_every_finding_that_is_not_ok_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (512, 512))
    found = list(doctor.checks(64, 8, tmp_path / "none"))
    assert {check.name for check in found if check.level == "fail"} == {"nofile", "model"}
    assert all(check.remedy for check in found if check.level != "ok")


@pytest.mark.parametrize("layers", [1, 4, 13, 30, 32, 61])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
def test_the_split_is_the_one_that_vllm_makes(layers: int, stages: int) -> None:
    from vllm.distributed.utils import get_pp_indices

    if stages > layers:
        assert doctor_model.layer_split(layers, stages, None).level == "fail"
        return
    bounds = [get_pp_indices(layers, rank, stages) for rank in range(stages)]
    split = [stop - start for start, stop in bounds]
    assert doctor_model.layer_split(layers, stages, None).found == f"{layers} layers as {' + '.join(map(str, split))}"


@pytest.mark.parametrize("partition, level", [("16,16", "ok"), ("17,15", "note"), ("16,15", "fail"), ("a,b", "fail")])
def test_a_partition_of_the_users_is_checked(partition: str, level: str) -> None:
    assert doctor_model.layer_split(32, 2, partition).level == level


def test_a_long_folder_for_sockets_is_noted(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    check = doctor_system.socket_path(str(folder))
    assert check.level == "note" and "/tmp is used" in check.remedy


def _levels(checks: list[Check]) -> dict[str, str]:
    return {check.name: check.level for check in checks}


def test_gpus_are_judged_by_what_torch_sees() -> None:
    gpu = {"name": "A", "memory": 1 << 30}
    good: dict[str, Any] = {"cuda": "13.0", "gpus": [gpu, gpu], "peer": [[True, True], [True, True]], "nccl": "2.28.0"}
    assert _levels(list(doctor_gpus.judge(good, 2))) == {"GPUs": "ok", "peer access": "ok", "NCCL": "ok"}
    assert _levels(list(doctor_gpus.judge(good, 4)))["GPUs"] == "fail"
    apart = {**good, "gpus": [gpu, {**gpu, "name": "B"}], "peer": [[True, False], [False, True]], "nccl": None}
    assert _levels(list(doctor_gpus.judge(apart, 2))) == {"GPUs": "note", "peer access": "note", "NCCL": "fail"}
    none = {"cuda": None, "gpus": [], "peer": [], "nccl": None}
    assert _levels(list(doctor_gpus.judge(none, 2))) == {"GPUs": "fail"}
