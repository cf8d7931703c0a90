"""Turn a recorded run into a picture, a Perfetto trace and a table of what each stage did.

A recording has, per stage and round, what the device did: compute, waiting for
a handoff, waiting for a hop, and idle in between. Compute is the stage's own
work; time in a receive is waiting, also while its kernel spins. Launch gaps
within a round count as compute. The bubble share is what is not compute.

Record with `vllm-handoff bench --record FOLDER`, or from a running server that
was started with VLLM_SERVER_DEV_MODE=1, which opens vLLM's /collective_rpc (keep
such a server to trusted clients).

examples:
  vllm-handoff timeline run.json
      writes run.png and run.trace.json (open it in ui.perfetto.dev), prints the table
  vllm-handoff timeline --url http://127.0.0.1:8000 --seconds 5 run.json
      records five seconds of a running server into run.json first
  vllm-handoff timeline run.json --from 0.5 --to 0.6
      draws a tenth of a second
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KINDS = ("compute", "hop", "handoff")
COLOURS = {"compute": "#4477aa", "hop": "#ccbb44", "handoff": "#ee6677"}
# Marks of a recorded round, by position; see vllm_handoff.worker.recorder.Mark.
BEGIN, HANDOFF, HOP_WAIT, HOP, _FORWARD, END = range(6)


@dataclass(frozen=True)
class Span:
    """What a stage did from `begin` to `end`, in seconds from the recording's start, for a round."""

    kind: str
    begin: float
    end: float
    round: int
    num_tokens: int


@dataclass(frozen=True)
class StageReport:
    """One stage's shares of the time between its first round and its last."""

    stage: int
    rounds: int
    seconds: float
    shares: dict[str, float]  # compute, hop, handoff, idle: together 1
    round_ms: float  # median time of a round's own compute
    host_ms: float  # median time the host took to launch a round

    @property
    def bubble(self) -> float:
        """Share of the time without compute of its own."""
        return 1 - self.shares["compute"]


def spans_of(stage: list[list[Any]], zero: float) -> list[Span]:
    """The spans of one stage's recorded rounds that had tokens."""
    found = []
    for number, num_tokens, _, marks, *_ in stage:
        if not num_tokens or marks[BEGIN] is None or marks[END] is None:
            continue
        at = marks[BEGIN]
        pieces = []
        if marks[HANDOFF] is not None:
            pieces.append(("handoff", at, marks[HANDOFF]))
            at = marks[HANDOFF]
        if marks[HOP_WAIT] is not None and marks[HOP] is not None:
            pieces += [("compute", at, marks[HOP_WAIT]), ("hop", marks[HOP_WAIT], marks[HOP])]
            at = marks[HOP]
        pieces.append(("compute", at, marks[END]))
        found += [Span(kind, a - zero, b - zero, number, num_tokens) for kind, a, b in pieces if b > a]
    return found


def report(stage: int, rounds: list[list[Any]], spans: list[Span]) -> StageReport:
    """Shares of time of one stage. Time in no span is idle."""
    seconds = max(span.end for span in spans) - min(span.begin for span in spans)
    shares = {kind: sum(s.end - s.begin for s in spans if s.kind == kind) / seconds for kind in KINDS}
    shares["idle"] = max(0.0, 1 - sum(shares.values()))
    compute: dict[int, float] = {}
    for span in spans:
        if span.kind == "compute":
            compute[span.round] = compute.get(span.round, 0.0) + span.end - span.begin
    hosts = [entry[4][1] - entry[4][0] for entry in rounds if entry[1] and entry[4][1]]
    return StageReport(
        stage,
        len(compute),
        seconds,
        shares,
        1000 * statistics.median(compute.values()),
        1000 * statistics.median(hosts),
    )


def load(recording: dict[str, Any]) -> tuple[list[StageReport], list[list[Span]]]:
    """Reports and spans by stage.

    Raises:
        ValueError: the recording has no rounds with tokens.
    """
    stages = recording["stages"]
    starts = [entry[3][BEGIN] for stage in stages for entry in stage if entry[3][BEGIN] is not None]
    if not starts:
        raise ValueError("the recording has no rounds: nothing ran while it was made")
    zero = min(starts)
    spans = [spans_of(stage, zero) for stage in stages]
    if not all(spans):
        raise ValueError("the recording has no rounds with tokens on some stage")
    return [report(i, stage, spans[i]) for i, stage in enumerate(stages)], spans


def perfetto(spans: list[list[Span]]) -> dict[str, Any]:
    """A trace in the format that Perfetto and chrome://tracing open: one process a stage."""
    events: list[dict[str, Any]] = []
    for stage, entries in enumerate(spans):
        events.append({"ph": "M", "pid": stage, "name": "process_name", "args": {"name": f"stage {stage}"}})
        events += [
            {
                "ph": "X", "pid": stage, "tid": 0, "name": f"{span.kind} {span.round}", "cat": span.kind,
                "ts": span.begin * 1e6, "dur": (span.end - span.begin) * 1e6,
                "args": {"round": span.round, "tokens": span.num_tokens},
            }
            for span in entries
        ]  # fmt: skip
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def draw(spans: list[list[Span]], reports: list[StageReport], path: Path, begin: float, end: float, title: str) -> None:
    """Draw the spans between two times, one lane a stage."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("timeline: the picture needs matplotlib: pip install 'vllm-handoff[plots]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(14, 1.2 + 0.9 * len(spans)), constrained_layout=True)
    for stage, entries in enumerate(spans):
        for kind in KINDS:
            inside = [s for s in entries if s.kind == kind and s.end > begin and s.begin < end]
            bars = [(1000 * (s.begin - begin), 1000 * (s.end - s.begin)) for s in inside]
            axes.broken_barh(bars, (stage - 0.4, 0.8), facecolors=COLOURS[kind], edgecolors="white", linewidth=0.3)
            if kind == "compute" and len({s.round for s in inside}) <= 60:
                for span in inside:
                    middle = 1000 * ((span.begin + span.end) / 2 - begin)
                    if span.end - span.begin > (end - begin) / 80:
                        axes.text(middle, stage, str(span.round), ha="center", va="center", fontsize=7, color="white")
    axes.set_yticks(range(len(spans)), [f"stage {r.stage}\nbubble {100 * r.bubble:.0f}%" for r in reports])
    axes.invert_yaxis()
    axes.set_xlim(0, 1000 * (end - begin))
    axes.set_xlabel("ms")
    axes.set_title(title)
    axes.legend(
        handles=[pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in KINDS],
        labels=["compute (round number)", "waiting for hidden states", "waiting for sampled tokens"],
        loc="upper right", fontsize=8, ncol=3,
    )  # fmt: skip
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def show(reports: list[StageReport]) -> None:
    """Print the table."""
    print("stage  rounds  seconds  compute     hop  handoff    idle  bubble  round ms  host ms")
    for r in reports:
        cells = "".join(f"{100 * r.shares[kind]:7.1f}%" for kind in (*KINDS, "idle"))
        print(
            f"{r.stage:>5}  {r.rounds:>6}  {r.seconds:>7.3f} {cells} {100 * r.bubble:6.1f}%"
            f"  {r.round_ms:>8.3f}  {r.host_ms:>7.3f}"
        )


def record_server(url: str, seconds: float) -> dict[str, Any]:
    """Record a running server.

    Raises:
        SystemExit: the server does not open /collective_rpc.
    """

    def call(on: bool) -> Any:
        body = json.dumps({"method": "handoff_record", "args": [on]}).encode()
        request = urllib.request.Request(f"{url}/collective_rpc", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read() or b"{}").get("results")

    try:
        call(True)
        time.sleep(seconds)
        return {"title": f"{url}, {seconds:g} s", "stages": call(False)}
    except OSError as error:
        raise SystemExit(
            f"timeline: {url}/collective_rpc: {error}. Start the server with VLLM_SERVER_DEV_MODE=1 to record it."
        ) from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recording", type=Path, help="recording, JSON; with --url it is written first")
    parser.add_argument("--url", help="record this server")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to record (default: %(default)s)")
    parser.add_argument("--from", dest="begin", type=float, help="draw from this second of the recording on")
    parser.add_argument("--to", dest="end", type=float, help="draw up to this second")
    parser.add_argument("--png", type=Path, help="picture (default: beside the recording)")
    parser.add_argument("--trace", type=Path, help="Perfetto trace (default: beside the recording)")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


def run(args: argparse.Namespace) -> int:
    if args.url:
        args.recording.write_text(json.dumps(record_server(args.url.rstrip("/"), args.seconds)))
    try:
        recording = json.loads(args.recording.read_text())
        reports, spans = load(recording)
    except (OSError, ValueError) as error:
        print(f"timeline: {args.recording}: {error}", file=sys.stderr)
        return 1
    last = max(span.end for entries in spans for span in entries)
    # By default a stretch from the middle, short enough to tell rounds apart.
    middle, width = last / 2, 24 * max(r.round_ms for r in reports) / 1000
    begin = max(0.0, middle - width / 2) if args.begin is None else args.begin
    end = min(last, begin + width) if args.end is None else args.end
    png = args.png or args.recording.with_suffix(".png")
    trace = args.trace or args.recording.with_suffix(".trace.json")
    trace.write_text(json.dumps(perfetto(spans)))
    draw(spans, reports, png, begin, end, recording.get("title", args.recording.stem))
    if args.json:
        rows = [vars(r) | {"bubble": r.bubble} for r in reports]
        print(json.dumps(rows, indent=1))
    else:
        show(reports)
        print(f"picture: {png}\ntrace:   {trace}")
    return 0
