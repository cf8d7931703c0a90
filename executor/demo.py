"""Serve a small real model on two pipeline stages and stream eight answers from it.

What happens, in order:
  1. checks: a supported vLLM, the plugin, the port, memory
  2. the model: SmolLM2-135M-Instruct, downloaded (93 MB) and converted the first time
  3. `vllm serve MODEL --pipeline-parallel-size 2 --distributed-executor-backend ...`,
     the real command, with its log in a file
  4. eight completions at once, streamed, printed with their prompts
  5. the server is stopped, and the executor's own count of rounds and handoffs printed

Two GPUs are used if there are two and vLLM was built for them, else the CPU.
The status is 0 only if all of it worked, two rounds were in flight at once, tokens
were handed over, and no process was left.

examples:
  vllm-handoff demo
  vllm-handoff demo --port 8123 --requests 16 --max-tokens 100
  vllm-handoff demo --model ./my-model --log-dir ./logs
  vllm-handoff demo --json | jq .statistics
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_handoff.executor import json_report
from vllm_handoff.executor.demo_streams import Answer, stream_all
from vllm_handoff.executor.server_process import ServerFailedError, ServerProcess
from vllm_handoff.executor.show_version import plugin_problem
from vllm_handoff.executor.version import UnsupportedVllmError, check_vllm_version

HOST = "127.0.0.1"
LOG = "server.log"
DEFAULT_MODEL = "smollm2-135m"
EXECUTOR = "vllm_handoff.executor.HandoffExecutor"
KV_CACHE_BYTES = 512 << 20
# Two stages, the engine and the server, each with torch and vLLM loaded, and the weights in float32.
CPU_MEMORY_BYTES = 4 << 30

# What the executor counts, by its key in VLLM_HANDOFF_STATS_FILE.
STATISTICS = {
    "rounds": "rounds",
    "max_in_flight": "most rounds in flight at once",
    "handoffs": "handoffs made",
    "handoffs_not_needed": "handoffs not needed",
}


class DemoError(RuntimeError):
    """The demo cannot go on. The message is one sentence for the user."""


@dataclass(frozen=True)
class Device:
    """Where the stages run, and what `vllm serve` must be told about it."""

    what: str
    flags: tuple[str, ...]
    env: dict[str, str]


# On a CPU: bfloat16 takes minutes to warm up on many processors; with one thread in
# the engine, fork is safe and saves each process 13 to 15 s of imports.
CPU = Device("the CPU", ("--dtype", "float32"), {"OMP_NUM_THREADS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "fork"})
GPUS = Device("two GPUs", (), {})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=8000, help="port on 127.0.0.1 for the server (default: 8000)")
    parser.add_argument(
        "--model",
        default=DEFAULT_MODEL,
        help=f"a model's folder, or a name that tools/models.py knows (default: {DEFAULT_MODEL})",
    )
    parser.add_argument("--requests", type=_count, default=8, help="how many completions at once (default: 8)")
    parser.add_argument("--max-tokens", type=_count, default=48, help="tokens of each completion (default: 48)")
    parser.add_argument(
        "--startup-timeout", type=float, default=300, help="seconds to wait for the server (default: 300)"
    )
    parser.add_argument(
        "--log-dir",
        type=Path,
        help="folder for the server's log (default: a temporary one, kept only if the demo fails)",
    )
    json_report.add_argument(parser)


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return count


def run(args: argparse.Namespace) -> int:
    with json_report.report_of(args) as report:
        problems = _run(args, report)
        report |= {"ok": not problems, "problems": problems}
    return 1 if problems else 0


def _run(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    log_dir = args.log_dir or Path(tempfile.mkdtemp(prefix="vllm-handoff-demo-"))
    log_dir.mkdir(parents=True, exist_ok=True)
    keep = args.log_dir is not None
    try:
        problems = _demo(args, log_dir, report)
        keep = keep or bool(problems)
    except DemoError as error:
        problems = [str(error)]
    finally:
        if not keep:
            shutil.rmtree(log_dir)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if (log_dir / LOG).exists() and problems:
        print(f"The server's log is {log_dir / LOG}.", file=sys.stderr)
    return problems


def _demo(args: argparse.Namespace, log_dir: Path, report: dict[str, Any]) -> list[str]:
    """Run the demo, fill in the report, and return what did not go as it should, one sentence each."""
    device = choose_device(check_installation())
    check_port(args.port)
    if device is CPU:
        check_memory(CPU_MEMORY_BYTES)
    model = get_model(args.model)
    statistics = log_dir / "statistics.json"
    statistics.unlink(missing_ok=True)

    command = serve_command(model, args.port, device)
    print(f"\nOn {device.what}:\n  {' '.join(command)}\n", flush=True)
    env = {**os.environ, "VLLM_HANDOFF_STATS_FILE": str(statistics.resolve())}
    env.update({"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", **device.env})
    server = ServerProcess(command, env, log_dir / LOG)
    problems: list[str] = []
    answers: list[Answer] = []
    try:
        url = f"http://{HOST}:{args.port}"
        seconds = server.wait_ready(f"{url}/health", args.startup_timeout, _waiting(server.log))
        _clear_line()
        report |= {"device": device.what, "command": command, "ready_s": seconds}
        print(f"The server is ready after {seconds:.0f} s. {args.requests} completions at once:\n", flush=True)
        start = time.monotonic()
        answers = asyncio.run(stream_all(url, args.requests, args.max_tokens, _print_answer))
        elapsed = time.monotonic() - start
    except ServerFailedError as error:
        _clear_line()
        problems.append(str(error))
    finally:
        # Also after Ctrl-C and SIGTERM; a second Ctrl-C must not leave the server running.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("Stopping the server.", flush=True)
        problems += server.stop()
        signal.signal(signal.SIGINT, before)
    if failed := [answer for answer in answers if answer.error]:
        problems.append(
            f"{len(failed)} of {len(answers)} completions failed. {failed[0].prompt!r}: {failed[0].error}\n"
            f"From {server.log}:\n{server.last_words()}"
        )
    elif answers:
        report["statistics"] = read_statistics(statistics)
        problems += summarise(answers, elapsed, statistics)
    if answers:
        report |= {"seconds": elapsed, "answers": [asdict(answer) for answer in answers]}
    return problems


def check_installation() -> str:
    """The installed vLLM's version, once everything that the server needs is known to be there."""
    try:
        found = check_vllm_version()
    except UnsupportedVllmError as error:
        raise DemoError(str(error)) from error
    if problem := plugin_problem():
        raise DemoError(problem)
    return found


def choose_device(vllm_version: str) -> Device:
    gpus = 0
    if shutil.which("nvidia-smi"):
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
        gpus = sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    if "cpu" in vllm_version:
        return CPU
    if gpus >= 2:
        return GPUS
    raise DemoError(
        f"This vLLM ({vllm_version}) was built for GPUs and two are needed, but nvidia-smi shows {gpus}: "
        "install vLLM for the CPU instead (make env)."
    )


def check_port(port: int) -> None:
    with socket.socket() as probe:
        # As the server does; else a port that was just in use would seem taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except (OSError, OverflowError) as error:
            raise DemoError(f"Port {port} cannot be used ({error}): give another with --port.") from error


def check_memory(needed: int) -> None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), needed)
    if available < needed:
        raise DemoError(f"The demo needs {needed / 2**30:.0f} GiB of memory and {available / 2**30:.1f} GiB are free.")


def get_model(name: str) -> Path:
    """The model's folder, made first if it is one that this project knows how to make."""
    if Path(name).is_dir():
        return Path(name).resolve()
    tool = Path(__file__).resolve().parents[1] / "tools" / "models.py"
    if not tool.is_file():
        raise DemoError(f"There is no folder {name}; outside a checkout of the project, give --model a model's folder.")
    # Its progress goes to stderr, to the user.
    made = subprocess.run([sys.executable, str(tool), name], stdout=subprocess.PIPE, text=True)
    if made.returncode:
        raise DemoError(f"The model {name} could not be made.")
    return Path(made.stdout.strip())


def serve_command(model: Path, port: int, device: Device) -> list[str]:
    # The `vllm` of this Python, whatever PATH says.
    vllm = Path(sys.executable).with_name("vllm")
    command = [str(vllm)] if vllm.is_file() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]
    command += ["serve", str(model), "--pipeline-parallel-size", "2", "--distributed-executor-backend", EXECUTOR]
    command += ["--host", HOST, "--port", str(port), "--served-model-name", "demo"]
    # By default vLLM kills its engine the moment it stops: no time for the executor to write its statistics.
    command += ["--shutdown-timeout", "20"]
    # Small and quick to start, rather than fast.
    command += ["--max-model-len", "1024", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES), "--enforce-eager"]
    return command + list(device.flags)


def read_statistics(path: Path) -> dict[str, Any]:
    """What the executor has counted; empty if it left nothing usable."""
    try:
        counts: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return counts if set(STATISTICS) <= set(counts) else {}


def summarise(answers: list[Answer], elapsed: float, statistics: Path) -> list[str]:
    """Print what was done, and return what should have been otherwise."""
    problems = []
    counts = read_statistics(statistics)
    if not counts:
        return [f"The executor left no usable statistics in {statistics}."]
    facts = {what: f"{counts[key]}" for key, what in STATISTICS.items()}
    tokens = sum(answer.tokens for answer in answers)
    facts["tokens"] = f"{tokens}"
    facts["tokens/s"] = f"{tokens / elapsed:.1f}"
    for what, value in facts.items():
        print(f"  {what:<30} {value:>8}")
    if counts["max_in_flight"] < 2:
        problems.append("There were never two rounds in flight: the stages took turns.")
    if counts["handoffs"] < 1:
        problems.append("No sampled tokens were handed from the last stage to the first.")
    return problems


def _print_answer(answer: Answer) -> None:
    print(f"> {answer.prompt}")
    print(f"  {answer.error or answer.text.strip()}\n", flush=True)


def _waiting(log: Path) -> Any:
    """A progress line for people, a line now and then for log files."""
    last = [-10.0]

    def tick(seconds: float) -> None:
        if sys.stdout.isatty():
            print(f"\r\033[KStarting the server: {seconds:.0f} s (log: {log})", end="", flush=True)
        elif seconds - last[0] >= 10:
            last[0] = seconds
            print(f"Starting the server: {seconds:.0f} s (log: {log})", flush=True)

    return tick


def _clear_line() -> None:
    if sys.stdout.isatty():
        print("\r\033[K", end="", flush=True)
