"""Look at this machine and say what would keep vllm-handoff from running, or from running well.

Nothing is started and nothing is changed. Each finding is one line:

  ok    as it should be
  note  works, and could be better; the line below says how
  FAIL  will not work; the line below says what to do

With --model (a folder, or a config.json) the split of its layers over the stages is
shown too: stages with unequal shares make each other wait.

The status is 0 without a FAIL, else 1. Run it as the user, and inside the
container or unit, that will run the server: limits differ between them.

examples:
  vllm-handoff doctor
  vllm-handoff doctor --pipeline-parallel-size 4 --model /models/llama
  vllm-handoff doctor --json | jq '.checks[] | select(.level == "fail")'
  sudo -u vllm vllm-handoff doctor       as the user that runs the service
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from vllm_handoff.executor import doctor_gpus, doctor_model, doctor_system
from vllm_handoff.executor.doctor_system import Check

_LABELS = {"ok": "ok  ", "note": "note", "fail": "FAIL"}
_COLOURS = {"ok": "\033[32m", "note": "\033[33m", "fail": "\033[31m"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--pipeline-parallel-size",
        "-pp",
        type=_positive,
        default=2,
        metavar="N",
        help="stages to plan for (default: 2)",
    )
    parser.add_argument(
        "--tensor-parallel-size", "-tp", type=_positive, default=1, metavar="N", help="GPUs a stage (default: 1)"
    )
    parser.add_argument("--model", type=Path, help="a model's folder or config.json, to see how its layers are split")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def _positive(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return count


def checks(stages: int, tensor_parallel: int, model: Path | None) -> Iterator[Check]:
    """All findings, one after the other, as they are made."""
    yield from doctor_system.versions()
    yield from doctor_gpus.checks(stages * tensor_parallel)
    yield from doctor_system.limits(stages * tensor_parallel)
    yield from doctor_system.processors(stages * tensor_parallel)
    if model is not None:
        yield from doctor_model.checks(model, stages)


def run(args: argparse.Namespace) -> int:
    found = []
    for check in checks(args.pipeline_parallel_size, args.tensor_parallel_size, args.model):
        found.append(check)
        if not args.json:
            _print(check)
    failed = [check for check in found if check.level == "fail"]
    notes = sum(check.level == "note" for check in found)
    if args.json:
        print(json.dumps({"ok": not failed, "checks": [check._asdict() for check in found]}, indent=2))
    else:
        print(f"\n{len(failed)} to mend, {notes} to consider, {len(found)} looked at.")
    return 1 if failed else 0


def _print(check: Check) -> None:
    label = _LABELS[check.level]
    if sys.stdout.isatty():
        label = f"{_COLOURS[check.level]}{label}\033[0m"
    print(f"{label}  {check.name:<14} {check.found}")
    if check.remedy:
        print(f"      {'':<14} -> {check.remedy}", flush=True)
