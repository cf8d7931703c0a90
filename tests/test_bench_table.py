"""What the benchmark's table says of tokens that differ."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_handoff.benchmarks.table import show, summarise


def _runs(**digests: list[str]) -> list[dict[str, Any]]:
    return [
        {"load": "1x1+1", "engine": engine, "pair": pair, "seconds": 1.0 + pair, "digest": digest}
        for engine, found in digests.items()
        for pair, digest in enumerate(found, -1)
    ]


def test_equal_tokens() -> None:
    (row,) = summarise(_runs(mp=["a", "a", "a"], handoff=["a", "a", "a"]))
    assert row["same_tokens"] and "tokens" not in row and row["handoff_ratio"] == 1.0


@pytest.mark.parametrize(
    ("digests", "groups"),
    [
        ({"handoff": ["a", "a"], "pp1": ["b", "b"], "drafts": ["b", "b"]}, ["handoff", "pp1, drafts"]),
        ({"handoff": ["a", "b"], "pp1": ["a", "a"]}, ["handoff (2 different answers)", "pp1"]),
        # All alike, and none repeats itself.
        ({"handoff": ["a", "b"], "pp1": ["b", "a"]}, ["handoff, pp1 (2 different answers)"]),
    ],
)
def test_who_agrees_with_whom(
    digests: dict[str, list[str]], groups: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = summarise(_runs(**digests))
    assert not row["same_tokens"] and row["tokens"] == groups
    show([row], list(digests))
    assert f"differ: {' | '.join(groups)}" in capsys.readouterr().out
