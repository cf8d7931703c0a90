"""What `vllm-handoff bench` reports of its runs: a row a load, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any, NamedTuple


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def without_samples(record: dict[str, Any]) -> dict[str, Any]:
    """A run's record for the report: percentiles in place of hundreds of thousands of latencies."""
    kept = dict(record)
    for key in ("first_token", "gaps"):
        if key in kept:
            values = kept.pop(key)
            kept[f"{key}_ms"] = [1000 * percentile(values, share) for share in (0.5, 0.99)] if values else []
    return kept


class Agreeing(NamedTuple):
    """Engines that gave the same tokens in one load; more than one digest: they did not repeat their own."""

    engines: list[str]
    digests: frozenset[str]

    def __str__(self) -> str:
        changing = "" if len(self.digests) == 1 else f" ({len(self.digests)} different answers)"
        return ", ".join(self.engines) + changing


def agreeing(records: Iterable[dict[str, Any]]) -> list[Agreeing]:
    """Which engines gave the same tokens in the runs of one load."""
    digests: dict[str, set[str]] = {}
    for record in records:
        digests.setdefault(record["engine"], set()).add(record["digest"])
    groups: dict[frozenset[str], list[str]] = {}
    for engine, found in digests.items():
        groups.setdefault(frozenset(found), []).append(engine)
    return [Agreeing(engines, found) for found, engines in groups.items()]


def summarise(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row a load: medians, the median ratio of pairs, equality of tokens, and latencies of online loads."""
    rows = []
    for load in dict.fromkeys(record["load"] for record in records):
        runs = {(r["engine"], r["pair"]): r for r in records if r["load"] == load and r["pair"] >= 0}
        row: dict[str, Any] = {"load": load}
        for engine in dict.fromkeys(record["engine"] for record in records):
            mine = [r for (name, _), r in runs.items() if name == engine]
            if not mine:
                continue
            row[engine] = statistics.median(r["seconds"] for r in mine)
            pairs = [p for name, p in runs if name == engine and ("mp", p) in runs]
            if pairs and engine != "mp":
                row[f"{engine}_ratio"] = statistics.median(
                    runs["mp", p]["seconds"] / runs[engine, p]["seconds"] for p in pairs
                )
                row["pairs"] = len(pairs)
            if "gaps" in mine[0]:
                for key in ("first_token", "gaps"):
                    values = [v for r in mine for v in r[key]]
                    row[f"{engine}_{key}_ms"] = [1000 * percentile(values, share) for share in (0.5, 0.99)]
        groups = agreeing(r for r in records if r["load"] == load)
        row["same_tokens"] = len(groups) == 1 and len(groups[0].digests) == 1
        if not row["same_tokens"]:
            row["tokens"] = [str(group) for group in groups]
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]], engines: list[str]) -> None:
    """Print the table: seconds, and for every engine but `mp` the median ratio of its pairs with `mp`."""
    head = "".join(f"{name:>18}" for name in engines)
    bounds = any("bound" in row for row in rows)
    print(f"{'load':>22}{head}  same tokens" + ("   bound  bound/ours" if bounds else ""))
    for row in rows:
        cells = []
        for name in engines:
            ratio = f" ({row[f'{name}_ratio']:.3f})" if f"{name}_ratio" in row else ""
            cells.append(f"{row[name]:.3f}{ratio}" if name in row else "-")
        line = f"{row['load']:>22}" + "".join(f"{cell:>18}" for cell in cells) + f"  {row['same_tokens']!s:>11}"
        ours = next((name for name in engines if name != "mp" and name in row), None)
        if "bound" in row and ours:
            line += f"{row['bound']:>8.3f}{100 * row['bound'] / row[ours]:>11.0f}%"
        print(line)
        if "tokens" in row:
            print(f"{'':>22}  differ: {' | '.join(row['tokens'])}")
        for name in engines:
            if f"{name}_gaps_ms" in row:
                first, gaps = row[f"{name}_first_token_ms"], row[f"{name}_gaps_ms"]
                print(
                    f"{name:>22}  first token p50 {first[0]:.1f} ms, p99 {first[1]:.1f} ms; "
                    f"between tokens p50 {gaps[0]:.2f} ms, p99 {gaps[1]:.2f} ms"
                )
