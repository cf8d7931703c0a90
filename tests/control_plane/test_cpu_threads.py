"""How cores are shared among the workers of a CPU deployment."""

from __future__ import annotations

import os

import pytest

from vllm_handoff.executor.cpu_threads import share_cores

VARIABLES = ("OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def inside(cores: list[int], workers: int, rank: int) -> dict[str, str]:
    with share_cores(cores, workers)(rank):
        found = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    return found


@pytest.mark.parametrize(
    ("cores", "workers", "rank", "expected"),
    [
        ([0, 1], 4, 3, {"OMP_NUM_THREADS": "1"}),
        ([0, 1], 2, 1, {"OMP_NUM_THREADS": "1"}),
        ([0, 1, 2, 3, 8], 2, 1, {"OMP_NUM_THREADS": "2", "OMP_PLACES": "{2,3}", "OMP_PROC_BIND": "true"}),
    ],
)
def test_shares(cores: list[int], workers: int, rank: int, expected: dict[str, str]) -> None:
    assert inside(cores, workers, rank) == expected
    assert not set(VARIABLES) & os.environ.keys()


def test_the_users_own_setting_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert inside([0, 1, 2, 3], 2, 0) == {"OMP_NUM_THREADS": "3"}
    assert os.environ["OMP_NUM_THREADS"] == "3"


def test_the_users_own_places_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_PLACES", "cores")
    assert inside([0, 1, 2, 3], 2, 0) == {"OMP_NUM_THREADS": "2", "OMP_PLACES": "cores"}
