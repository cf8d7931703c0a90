"""Random load with known answers on a live engine, with faults injected if asked for.

Starts an engine with HandoffExecutor, sends it requests of all kinds, and
checks every token of every answer. The built-in toy model's answers are known
in advance; with --model or --url each of a set of greedy requests first runs
alone, and the load must give the same. Any wrong, lost, doubled or swapped
token, any request without an end, any process or file left behind makes the
exit status 1, and the smallest case that could be found is printed.

examples:
  vllm-handoff stress
      a minute of load on two stages, toy model; needs no model, no network
  vllm-handoff stress --duration 600 --faults
      ten minutes in many engine lives, each ended by another fault
  vllm-handoff stress --faults kill stop none
      two engines that are struck, and one that runs to the end
  vllm-handoff stress --kv-tokens 1500 --rate 100 --abort 0.4 --structured 0.2
      little KV space, so that requests are preempted; many clients go away
  vllm-handoff stress --model FOLDER --set 'dtype="float32"'
      a real model (greedy answers depend on the batch in 16 bits: see docs/reliability.md)
  vllm-handoff stress --url http://127.0.0.1:8000/v1
      a running server
  vllm-handoff stress --replay case.json
      a case that an earlier run has printed
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vllm_handoff.executor import json_report
from vllm_handoff.stress.faults import FAULTS, STALL_S
from vllm_handoff.stress.plan import Case, Mix
from vllm_handoff.stress.planting import PLANTS

_DEFAULTS = Mix()
TOY_CONTEXT = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vllm-handoff stress`."""
    run = parser.add_argument_group("the run")
    run.add_argument("--seed", type=int, default=0, help="of everything random (default: %(default)s)")
    run.add_argument("--duration", type=float, default=60, metavar="S", help="with starts (default: %(default)s)")
    json_report.add_argument(run)
    run.add_argument("--logs", type=Path, metavar="FOLDER", help="for the engines' logs (default: a temporary one)")
    run.add_argument("--shrink", type=float, default=120, metavar="S", help="seconds to look for a smaller case")
    run.add_argument("--replay", type=Path, metavar="FILE", help="run a printed case instead of new load")
    run.add_argument("--plant", choices=PLANTS, help="plant an error, to see that it is found")
    what = parser.add_argument_group("what it runs on")
    what.add_argument("--model", metavar="FOLDER", help="a real model instead of the toy")
    what.add_argument("--url", help="a running server's /v1 address, instead of an engine")
    what.add_argument("--stages", type=int, default=2, help="pipeline stages (default: %(default)s)")
    what.add_argument("--kv-tokens", type=int, metavar="N", help="toy: KV space for N tokens (default: no shortage)")
    what.add_argument("--set", action="append", default=[], metavar="KEY=JSON", help="engine option")
    load = parser.add_argument_group("the load")
    load.add_argument("--rate", type=float, default=_DEFAULTS.rate, help="requests a second (default: %(default)s)")
    load.add_argument("--prompt", nargs=2, type=int, default=_DEFAULTS.prompt, metavar=("MIN", "MAX"), help="tokens")
    load.add_argument("--output", nargs=2, type=int, default=_DEFAULTS.output, metavar=("MIN", "MAX"), help="tokens")
    load.add_argument(
        "--outstanding",
        type=int,
        default=_DEFAULTS.outstanding,
        help="unanswered requests at most (default: %(default)s)",
    )
    for name, what_for in (
        ("abort", "clients that go away"),
        ("burst", "phases whose requests come all at once"),
        ("drain", "phases that begin with an empty engine"),
        ("stop", "requests with stop tokens"),
        ("structured", "requests with a grammar"),
    ):
        load.add_argument(
            f"--{name}",
            type=float,
            default=getattr(_DEFAULTS, name),
            metavar="SHARE",
            help=f"share of {what_for} (default: %(default)s)",
        )
    load.add_argument(
        "--sampling",
        type=float,
        metavar="SHARE",
        help=f"share with sampling options (toy: {_DEFAULTS.sampling}; else 0)",
    )
    load.add_argument("--pool", type=int, default=32, metavar="N", help="different requests, with a real model")
    load.add_argument("--vocabulary", type=int, metavar="N", help="prompt tokens are below N, with a real model")
    faults = parser.add_argument_group("faults")
    faults.add_argument(
        "--faults", nargs="*", choices=[*FAULTS, "none"], metavar="FAULT",
        help=f"in turns, each ends an engine; all if no name follows: {', '.join(FAULTS)}; none: no fault any more",
    )  # fmt: skip
    faults.add_argument(
        "--fault-after", nargs=2, type=float, default=(3.0, 12.0), metavar=("MIN", "MAX"),
        help="seconds of load before a fault (default: 3 12)",
    )  # fmt: skip


def mix_of(args: argparse.Namespace) -> Mix:
    """The load that was asked for."""
    toy = not (args.model or args.url)
    sampling = args.sampling if args.sampling is not None else (_DEFAULTS.sampling if toy else 0.0)
    vocabulary = args.vocabulary or (_DEFAULTS.vocabulary if toy else 512)
    return Mix(
        seed=args.seed, rate=args.rate, prompt=tuple(args.prompt), output=tuple(args.output),
        outstanding=args.outstanding, abort=args.abort, burst=args.burst, drain=args.drain, stop=args.stop,
        sampling=sampling, structured=args.structured, vocabulary=vocabulary, pool=0 if toy else args.pool,
        drafts=any(item.startswith("speculative_config=") for item in args.set),
    )  # fmt: skip


def engine_options(args: argparse.Namespace, folder: Path, mix: Mix) -> dict[str, Any]:
    """Arguments of vLLM's engine."""
    from vllm_handoff.stress.toy_tokens import write_folder

    layers = max(2, args.stages)
    options: dict[str, Any] = {
        "pipeline_parallel_size": args.stages,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "seed": 0,
        "enable_log_requests": False,
    }
    if args.model:
        options |= {"model": args.model, "skip_tokenizer_init": not mix.structured}
    else:
        options |= {
            "model": str(write_folder(folder / "toy", layers, TOY_CONTEXT)),
            "load_format": "dummy",
            # A grammar is about text. Nothing else here is.
            "skip_tokenizer_init": not mix.structured,
            "max_model_len": TOY_CONTEXT,
            "block_size": 32,
            "kv_cache_memory_bytes": _kv_bytes(args.kv_tokens or 64 * TOY_CONTEXT, layers, args.stages),
        }
    return options | {key: json.loads(value) for key, _, value in (item.partition("=") for item in args.set)}


def _kv_bytes(tokens: int, layers: int, stages: int) -> int:
    from vllm_handoff.stress.toy_tokens import HEAD_SIZE

    bytes_per_value = 4 if _on_cpu() else 2
    # Key and value, of each layer of the fullest stage.
    return tokens * 2 * HEAD_SIZE * bytes_per_value * -(-layers // stages)


def _on_cpu() -> bool:
    # How vLLM itself tells; importing it takes many seconds, and only the engine's process needs it.
    return "cpu" in version("vllm")


def run(args: argparse.Namespace) -> int:
    """Run the load and say what came of it. The exit status is 1 if anything was wrong."""
    with tempfile.TemporaryDirectory(prefix="vllm-stress-") as temporary:
        if args.logs is not None:
            args.logs.mkdir(parents=True, exist_ok=True)
        with json_report.report_of(args) as report:
            return _run(args, Path(temporary), args.logs or Path(temporary), report)


def _run(args: argparse.Namespace, temporary: Path, logs: Path, report: dict[str, Any]) -> int:
    from tqdm import tqdm

    from vllm_handoff.stress.campaign import Campaign
    from vllm_handoff.stress.checks import toy_oracle

    case = Case.of(json.loads(args.replay.read_text())) if args.replay else None
    mix = case.mix if case else mix_of(args)
    possible = [name for name, fault in FAULTS.items() if not (fault.needs_gpu and _on_cpu())]
    faults = possible if args.faults == [] else list(args.faults or ())
    toy = not (args.model or args.url)
    if toy and mix.prompt[1] + mix.output[1] > TOY_CONTEXT:
        print(
            f"stress: prompts of up to {mix.prompt[1]} tokens and answers of up to {mix.output[1]} do not fit "
            f"the toy's context of {TOY_CONTEXT}: give a smaller --prompt or --output",
            file=sys.stderr,
        )
        return 2
    if args.url:
        setup: dict[str, Any] = {"url": args.url.rstrip("/"), "model": model_of(args.url.rstrip("/"))}
    else:
        setup = {"options": engine_options(args, temporary, mix), "toy": toy}
        if any(FAULTS[name].stalls for name in faults if name in FAULTS):
            handoff = setup["options"].setdefault("additional_config", {}).setdefault("handoff", {})
            handoff.setdefault("stall_seconds", STALL_S)
    if args.plant:
        setup["plant"] = args.plant
    if impossible := [name for name in faults if name in FAULTS and name not in possible]:
        print(f"stress: this vLLM was built for the CPU, and --faults {impossible[0]} needs a GPU", file=sys.stderr)
        return 2
    if args.url and faults:
        print("stress: faults cannot be injected into a server that is already running; drop --faults", file=sys.stderr)
        return 2
    print(f"seed {mix.seed}; logs in {logs}", flush=True)
    with tqdm(unit="tok", desc="stress", mininterval=1, dynamic_ncols=True) as bar:

        def progress(tokens: int, what: str) -> None:
            bar.update(tokens)
            bar.set_postfix_str(what, refresh=False)

        oracle = toy_oracle(max(2, args.stages), TOY_CONTEXT) if toy else None
        campaign = Campaign(
            setup, environment(), mix, oracle, logs, args.duration, faults, tuple(args.fault_after), progress
        )
        if case is not None:
            return _replay(campaign, case, report)
        figures = campaign.run()
    print(figures.table())
    report |= {"ok": not figures.problems, "mix": asdict(mix), "options": setup, **figures.to_json()}
    for problem in figures.problems[:10]:
        print(f"\nPROBLEM ({problem.kind}): {problem.what}")
    if campaign.failed_case is not None:
        report["smallest_case"] = _smallest(args, campaign, Path.cwd()) if args.shrink > 0 else None
    elif figures.problems:
        print(f"\nThe seed was {mix.seed}.")
    return 1 if figures.problems else 0


def environment() -> dict[str, str]:
    """Variables for the engine, unless they are set."""
    wanted = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if _on_cpu():
        wanted |= {"OMP_NUM_THREADS": "1", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    return {name: value for name, value in wanted.items() if name not in os.environ}


def model_of(url: str) -> str:
    """The name of the model that a server serves."""
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/models", timeout=10) as response:
        name: str = json.load(response)["data"][0]["id"]
    return name


def _smallest(args: argparse.Namespace, campaign: Any, folder: Path) -> dict[str, Any]:
    """Look for a smaller case that fails, write it to a file and print how to run it again."""
    from vllm_handoff.stress.shrink import Rerun, shrink

    case = campaign.failed_case
    about = campaign.about_failure
    print(f"\nLooking for a smaller case for at most {args.shrink:.0f} s ...", flush=True)
    rerun = Rerun(campaign)
    try:
        found, problems = shrink(case, rerun, about, args.shrink)
    finally:
        rerun.close()
    file = folder / f"stress-case-{case.mix.seed}.json"
    file.write_text(json.dumps(found.to_json()) + "\n")
    if problems:
        print(f"Smallest case that failed again: {len(found.numbers or ())} of {len(case.numbers)} requests, numbers "
              f"{list(found.numbers or ())[:20]}: {problems[0].what}")  # fmt: skip
    else:
        print(f"No part of it failed again: it depends on timing. The whole case has {len(case.numbers)} requests.")
    print(f"Seed {case.mix.seed}, engine {case.life}. To run it again, with the same other options:")
    print(f"  vllm-handoff stress --replay {file}")
    return found.to_json()


def _replay(campaign: Any, case: Case, report: dict[str, Any]) -> int:
    from vllm_handoff.stress.shrink import Rerun

    rerun = Rerun(campaign)
    try:
        problems = rerun(case, campaign.seconds)
    finally:
        rerun.close()
    problems += campaign.figures.problems
    for problem in problems:
        print(f"PROBLEM ({problem.kind}): {problem.what}")
    print(f"{len(case.numbers or ())} requests, {len(problems)} problems")
    report |= {"ok": not problems, "case": case.to_json(), "problems": [problem._asdict() for problem in problems]}
    return 1 if problems else 0
