"""Compare vLLM's own `mp` executor with HandoffExecutor on the same loads, in one run.

Both engines are started once and stay up side by side on the same devices; the
loads then run on one and on the other in turns, so that a drift of the machine
meets both. For each load: the median time of each, and the median of the
ratios pair by pair (above 1: ours is faster). The tokens of both must be
equal; if they are not, the exit status is 1, and the engines that agree are
named together. The bound is the least time in
which any schedule could serve the load, worked out from the stages' times in a
recorded run of each load; "bound/ours" says how near ours is to it.

examples:
  vllm-handoff bench
      the standard loads on two GPUs, 8B shape, dummy weights
  vllm-handoff bench --loads 256x32+256 --pairs 3
  vllm-handoff bench --loads --online 20 40 --json out.json
      requests arriving at 20 and at 40 a second, nothing else
  vllm-handoff bench --kv-gib 12 --variant deep '{"additional_config": {"handoff": {"depth": 6}}}'
      ours twice, once with other settings; "env" inside the object sets environment variables
  vllm-handoff bench --model FOLDER --set 'dtype="float32"' --set enforce_eager=true
      a real model, with engine options
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_handoff.benchmarks.loads import SHAPES, STANDARD, Load, OnlineLoad, write_shape
from vllm_handoff.benchmarks.nearness import add_bounds, write_recording
from vllm_handoff.benchmarks.table import show, summarise, without_samples
from vllm_handoff.executor import json_report

EXECUTOR = "vllm_handoff.executor.HandoffExecutor"


class Child:
    """An engine in its own process (see driver.py)."""

    def __init__(self, name: str, options: dict[str, Any], environment: dict[str, str], log: Path) -> None:
        self.name = name
        self._ready = False
        read, write = os.pipe()
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "vllm_handoff.benchmarks.driver", json.dumps(options), str(write)],
            stdin=subprocess.PIPE, stdout=self._log, stderr=subprocess.STDOUT, pass_fds=[write], text=True,
            env=os.environ | environment, start_new_session=True,
        )  # fmt: skip
        os.close(write)
        self._answers = os.fdopen(read)
        self.log_path = log

    def answer(self) -> Any:
        """The next answer.

        Raises:
            RuntimeError: the process ended, with the end of its log.
        """
        line = self._answers.readline()
        if not line:
            tail = "\n".join(self.log_path.read_text().splitlines()[-25:])
            raise RuntimeError(f"the {self.name} engine ended; the end of {self.log_path}:\n{tail}")
        return json.loads(line)

    def wait_ready(self) -> None:
        """Wait until the engine is up."""
        if not self._ready:
            print(f"{self.name} ready after {self.answer()['ready']:.1f} s", flush=True)
            self._ready = True

    def ask(self, command: dict[str, Any]) -> Any:
        """Run a command and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self.answer()

    def stop(self) -> None:
        """End the engine and all its processes."""
        if self._process.poll() is None and self._process.stdin is not None:
            try:
                self._process.stdin.close()
                self._process.wait(timeout=20)
            except (OSError, subprocess.TimeoutExpired):
                pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vllm-handoff bench`."""
    parser.add_argument(
        "--loads", nargs="*", default=list(STANDARD), help="REQUESTSxPROMPT+GENERATED (default: %(default)s)"
    )
    parser.add_argument(
        "--online", nargs="*", type=float, default=[], metavar="RATE", help="arrivals a second; 0: all at once"
    )
    parser.add_argument("--pairs", type=int, default=5, help="how often each load runs on each (default: %(default)s)")
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="8b", help="dummy-weight model (default: %(default)s)"
    )
    parser.add_argument("--model", type=Path, help="a model folder instead of a shape")
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages (default: %(default)s)")
    parser.add_argument(
        "--memory", type=float, default=0.42, help="share of GPU memory for each engine (default: %(default)s)"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="engine option of both")
    parser.add_argument(
        "--variant",
        nargs=2,
        action="append",
        default=[],
        metavar=("NAME", "JSON"),
        help="ours once more, set otherwise",
    )
    parser.add_argument(
        "--kv-gib",
        type=float,
        metavar="GIB",
        help="KV space of each engine on each GPU; all engines then start at once",
    )
    parser.add_argument("--without", action="append", default=[], metavar="ENGINE", help="leave mp or handoff out")
    json_report.add_argument(parser)
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FOLDER",
        help="afterwards record each load once on ours, for `vllm-handoff timeline`",
    )
    parser.add_argument(
        "--no-bound", action="store_true", help="leave out the bound, for which each load runs once more on ours"
    )
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs (default: a temporary one)")
    parser.add_argument("--budget", type=float, default=3600, metavar="S", help="start no further run after S seconds")


def engine_options(args: argparse.Namespace, folder: Path) -> dict[str, dict[str, Any]]:
    """LLM(...) arguments of each engine."""
    common: dict[str, Any] = dict(
        model=str(args.model or write_shape(args.shape, folder)), pipeline_parallel_size=args.stages,
        skip_tokenizer_init=True, enable_prefix_caching=False, max_num_seqs=512, max_num_batched_tokens=8192,
        max_model_len=8192, gpu_memory_utilization=args.memory, disable_log_stats=True,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    )  # fmt: skip
    if args.model is None:
        common["load_format"] = "dummy"
    common |= {key: json.loads(value) for key, _, value in (item.partition("=") for item in args.set)}
    if args.kv_gib is not None:
        common["kv_cache_memory_bytes"] = int(args.kv_gib * 2**30)
    ours = common | {"distributed_executor_backend": EXECUTOR}
    engines: dict[str, dict[str, Any]] = {"mp": common | {"distributed_executor_backend": "mp"}, "handoff": ours}
    for name, changes in args.variant:
        engines[name] = ours | json.loads(changes)
    return {name: options for name, options in engines.items() if name not in args.without}


def measure(children: list[Child], args: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    """Run every load on every engine in turns. One record a run."""
    from tqdm import tqdm

    commands: list[tuple[str, dict[str, Any]]] = [(load, {"load": load}) for load in args.loads]
    commands += [(str(OnlineLoad(rate)), {"online": asdict(OnlineLoad(rate))}) for rate in args.online]
    records: list[dict[str, Any]] = []
    bar = tqdm(total=len(commands) * len(children) * (args.pairs + 1), unit="run", mininterval=2)
    for name, command in commands:
        for pair in range(-1, args.pairs):
            # Pair -1 warms up; the order within a pair alternates.
            for child in children if pair % 2 else children[::-1]:
                bar.update()
                if time.monotonic() > deadline:
                    continue
                result = child.ask(command | {"seed": 0})
                records.append({"load": name, "engine": child.name, "pair": pair, **result})
    bar.close()
    return records


def record(children: list[Child], args: argparse.Namespace) -> dict[str, list[Any]]:
    """Record one more run of each load on each of ours; by load, the rounds of each rank of the first of ours."""
    recordings: dict[str, list[Any]] = {}
    ours = [child for child in children if child.name != "mp"]
    for child in ours if args.record else ours[:1]:
        for load in args.loads:
            ranks = child.ask({"record": load, "seed": 0})
            recordings.setdefault(load, ranks)
            if args.record:
                write_recording(args.record, child.name, load, ranks)
    return recordings


def run(args: argparse.Namespace) -> int:
    """The command."""
    for load in args.loads:
        Load.parse(load)
    with json_report.report_of(args) as report:
        rows = _run(args, report)
    return 0 if all(row["same_tokens"] for row in rows) else 1


def _run(args: argparse.Namespace, report: dict[str, Any]) -> list[dict[str, Any]]:
    deadline = time.monotonic() + args.budget
    with tempfile.TemporaryDirectory(prefix="handoff-bench-") as name:
        folder = Path(name)
        logs = args.logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        children: list[Child] = []
        try:
            for engine, options in engine_options(args, folder).items():
                environment = options.pop("env", {})
                print(f"starting {engine} (log: {logs / engine}.log)", flush=True)
                children.append(Child(engine, options, environment, logs / f"{engine}.log"))
                if args.kv_gib is None:
                    # One after the other: each sizes its memory by what is free.
                    children[-1].wait_ready()
            for child in children:
                child.wait_ready()
            records = measure(children, args, deadline)
            recordings = record(children, args) if args.record or not args.no_bound else {}
        finally:
            for child in children:
                child.stop()
    rows = summarise(records)
    costs = [] if args.no_bound else add_bounds(rows, recordings, args.stages)
    show(rows, [child.name for child in children])
    report |= {
        "arguments": {name: value for name, value in vars(args).items() if name != "run"},
        "rows": rows,
        "stage_times": costs,
        "runs": [without_samples(record) for record in records],
    }
    return rows
