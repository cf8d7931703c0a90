"""Simulate stages, rounds and scheduling policies: predictions beside measurements, counts, and pictures.

The simulator is pure Python and deterministic, needs no device and no vLLM, and
reuses the scheduler's own policy. Its constants are fitted to runs of an 8B
Llama on H200s (simulator/measured.json).

Without options it prints, for every measured run: the measured seconds, the
predicted ones, the bound (the least time in which any schedule could serve the
load with these stage times), and how near the measured run is to the bound.
The exit status is 1 if a prediction is off by more than 10%, unless the run is
listed as a known exception.

  --counts N     rounds, empty rounds and rows a round on N stages for one
                 request, eight, a burst, a burst that drains and random
                 arrivals; vLLM's policy beside ours
  --pictures     throughput and inter-token latency against concurrency for PP
                 2, 4, 8 and 16: throughput.png and inter_token_latency.png, in
                 docs/pictures unless a folder is given; some minutes
  --load         one load on N stages (--stages) of as many layers each (--layers);
                 --host-ms is what a round of decodes takes a stage's host, which
                 is hidden while the stages are large, and counts when they are small
  --fit          fit the constants to the measured runs again, and write them to
                 simulator/measured.json; about ten minutes

examples:
  vllm-handoff simulate
  vllm-handoff simulate --counts 2
  vllm-handoff simulate --pictures
  vllm-handoff simulate --load 2000x512+128 --stages 8 --json
  vllm-handoff simulate --load 64x512+128 --stages 4 --layers 8 --host-ms 2.4
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from vllm_handoff.executor import json_report
from vllm_handoff.scheduler_ext.stage_cost import stage_costs
from vllm_handoff.simulator.bound import bound
from vllm_handoff.simulator.calibration import MEASURED, Calibration, even_pipeline, fit, simulate
from vllm_handoff.simulator.counts import count_all, table
from vllm_handoff.simulator.requests import Arrivals, burst

ALLOWED = 0.10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vllm-handoff simulate`."""
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--counts", type=int, metavar="N", help="rounds of five loads on N stages")
    what.add_argument(
        "--pictures", type=Path, nargs="?", const=Path("docs/pictures"), metavar="FOLDER", help="draw the pictures"
    )
    what.add_argument("--load", metavar="LOAD", help="one load, as REQUESTSxPROMPT+GENERATED")
    what.add_argument("--fit", action="store_true", help="fit the constants again")
    parser.add_argument("--stages", type=int, default=2, metavar="N", help="for --load (default: %(default)s)")
    parser.add_argument(
        "--layers", type=int, default=16, metavar="N", help="of each stage, for --load (default: %(default)s)"
    )
    parser.add_argument("--host-ms", type=float, metavar="MS", help="for --load (default: as fitted)")
    json_report.add_argument(parser)


def run(args: argparse.Namespace) -> int:
    """The command."""
    with json_report.report_of(args) as report:
        return _run(args, report)


def _run(args: argparse.Namespace, report: dict[str, Any]) -> int:
    calibration = Calibration.load()
    if args.fit:
        return refit(calibration)
    if args.counts is not None:
        if args.counts < 1:
            print("error: --counts takes a number of stages from 1", file=sys.stderr)
            return 1
        counted = count_all(args.counts, calibration)
        print(table(args.counts, counted))
        report["rows"] = [{"load": load, "policy": policy, **found._asdict()} for load, policy, found in counted]
        return 0
    if args.pictures is not None:
        from vllm_handoff.simulator.plots import draw

        draw(args.pictures, calibration)
        return 0
    if args.load is not None:
        return one_load(args, calibration, report)
    return compare(calibration, report)


def compare(calibration: Calibration, report: dict[str, Any]) -> int:
    """Print the predictions of all measured runs. 1 if one is off by more than allowed and not known to be."""
    rows = report["rows"] = []
    print(f"{'run':<46}{'measured':>9}{'predicted':>10}{'error':>8}{'bound':>8}{'cohorts':>8}{'bound/measured':>15}")
    status = 0
    for point in calibration.points:
        seconds = simulate(point, calibration.model, calibration.constants).seconds
        error = seconds / point.seconds - 1
        least = bound(point.load, stage_costs(calibration.model, point.split, calibration.constants.device))
        rows.append({
            "run": point.name, "measured_s": point.seconds, "predicted_s": seconds, "error": error,
            "bound_s": least.seconds, "cohorts": least.cohorts,
        })  # fmt: skip
        mark = ""
        if abs(error) > ALLOWED:
            known = point.name in calibration.exceptions
            mark = "  off, as known" if known else "  off"
            status |= not known
        print(
            f"{point.name:<46}{point.seconds:>9.3f}{seconds:>10.3f}{100 * error:>+7.1f}%"
            f"{least.seconds:>8.3f}{least.cohorts:>8}{100 * least.seconds / point.seconds:>14.0f}%{mark}"
        )
    return status


def refit(calibration: Calibration) -> int:
    """Fit, and write what was found where the constants are kept."""
    content = json.loads(MEASURED.read_text())
    content["constants"] = fit(calibration.points, calibration.model)
    MEASURED.write_text(json.dumps(content, indent=1) + "\n")
    print(json.dumps(content["constants"], indent=1))
    print("Copy the device's part into scheduler_ext/stage_cost.py (H200): `vllm-handoff plan` uses it.")
    return compare(Calibration.load(), {})


def one_load(args: argparse.Namespace, calibration: Calibration, report: dict[str, Any]) -> int:
    """Print what both policies make of a load."""
    text, stages, rows = args.load, args.stages, []
    if min(stages, args.layers) < 1 or (args.host_ms is not None and args.host_ms < 0):
        print("error: --stages and --layers are numbers from 1, --host-ms is not negative", file=sys.stderr)
        return 1
    launch = None if args.host_ms is None else args.host_ms / 1000
    try:
        requests, prompt, generated = (int(part) for part in text.replace("+", "x").split("x"))
    except ValueError:
        print(f"error: a load is written REQUESTSxPROMPT+GENERATED, such as 64x512+128, not {text!r}", file=sys.stderr)
        return 1
    apart = calibration.constants.host.admit
    print(f"{'policy':<8}{'seconds':>9}{'tokens/s':>10}{'rounds':>8}{'empty':>7}{'gap p50 ms':>12}{'gap p99 ms':>12}")
    for engine, name in (("mp", "vLLM"), ("handoff", "ours")):
        pipeline = even_pipeline(engine, stages, calibration, layers=args.layers, launch=launch)
        found = pipeline.run(Arrivals(burst(requests, prompt, generated, apart)))
        gaps = found.gaps() or [0.0]
        empty = sum(not made.rows for made in found.rounds)
        print(
            f"{name:<8}{found.seconds:>9.3f}{found.throughput:>10.0f}{len(found.rounds) - empty:>8}{empty:>7}"
            f"{1000 * gaps[len(gaps) // 2]:>12.2f}{1000 * gaps[int(0.99 * len(gaps))]:>12.2f}"
        )
        rows.append({
            "policy": name, "seconds": found.seconds, "tokens_per_s": found.throughput,
            "rounds": len(found.rounds) - empty, "empty": empty,
            "gap_p50_s": gaps[len(gaps) // 2], "gap_p99_s": gaps[int(0.99 * len(gaps))],
        })  # fmt: skip
    least = bound((requests, prompt, generated), [stage.cost for stage in pipeline.stages])
    report |= {"load": text, "stages": stages, "rows": rows, "bound_s": least.seconds, "cohorts": least.cohorts}
    print(f"bound   {least.seconds:>9.3f}  with {least.cohorts} cohorts, {least.prefill:.3f} s of it for the prompts")
    return 0
