"""Say how many layers each pipeline stage should hold, so that all stages take equally long.

Why: vLLM gives every stage the same number of layers. But the last stage also
multiplies with the head (hidden size x vocabulary: for an 8B Llama as much as
two and a half layers) and samples. All stages wait for the slowest, so it
should get fewer layers.

How much fewer depends on what the engine does. A decoding round reads all
weights for a few tokens, and the head counts in full. Of a prompt only the last
token meets the head, so prefill wants an even split. Measured with an 8B Llama
on two H200s, 17,15 beside 16,16: about 5% faster where decoding dominates (64
requests of 512 + 128 tokens, 256 of 32 + 256), about 1% slower where prefill
does (256 of 512 + 128). Say what your load is like:

  --decode-rows     decoding requests that share one round: with N requests at
                    a time on P stages, N / P
  --prefill-share   prompt tokens as a share of all tokens; answers of 128
                    tokens to prompts of 512 make 0.8
  --context         tokens of context of a request while it decodes

The defaults (32, 0.5, 1024) stand for a chat server that is busy, not full.

Only MODEL's config.json is read, and nothing is started. Stage times are those
of an H200, from constants fitted to measured runs; on another device they are
off, but the split hardly changes, since it depends on their ratio alone. To be
sure, plan from a recording of your own run (see vllm-handoff timeline --help):
--recording then takes the place of the three options above.

Apply the split in one of two ways; the first wins:
  VLLM_PP_LAYER_PARTITION=17,15 vllm serve ...
  vllm serve ... --additional-config '{"handoff": {"layer_split": "auto"}}'
      the backend makes the plan itself at start, for the defaults, and logs it

The KV cache has the size that the fullest stage leaves room for: a stage with
more layers has less, so the plan can cost a few percent of KV space.

The plan also says what a prefill chunk (--max-num-batched-tokens) costs. Small
chunks fill and drain the pipeline faster, and each costs a round. This is
advice: nothing changes the chunk size for you.

examples:
  vllm-handoff plan ./Llama-3.1-8B --pipeline-parallel-size 2
  vllm-handoff plan ./Llama-3.1-8B --pipeline-parallel-size 4 --prefill-share 0.9
      long prompts, short answers
  vllm-handoff plan ./config.json --pipeline-parallel-size 2 --split 18,14
      the stage times of a split of your own, beside the even one and the plan
  vllm-handoff plan ./Llama-3.1-8B --pipeline-parallel-size 4 --recording run.json --recorded-split 16,16
      for four stages, from what a run on two with 16 layers each took
  vllm-handoff plan ./Llama-3.1-8B --pipeline-parallel-size 2 --json
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from dataclasses import asdict
from pathlib import Path

from vllm_handoff.executor.timeline import load
from vllm_handoff.scheduler_ext.chunk_size import ChunkAdvice, PrefillLoad, advise_chunk
from vllm_handoff.scheduler_ext.layer_split import (
    OperatingPoint,
    Plan,
    RecordedStages,
    assess,
    even_split,
    plan_split,
)
from vllm_handoff.scheduler_ext.model_shape import ModelShape, ModelShapeError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `vllm-handoff plan`."""
    point, prefill = OperatingPoint(), PrefillLoad()
    parser.add_argument("model", type=Path, metavar="MODEL", help="the model's folder, or a config.json")
    parser.add_argument("--pipeline-parallel-size", "-pp", type=int, required=True, metavar="N", help="stages")
    parser.add_argument(
        "--tensor-parallel-size", "-tp", type=int, default=1, metavar="N", help="devices of each stage (default: 1)"
    )
    parser.add_argument(
        "--decode-rows", type=int, default=point.rows, metavar="N", help="requests of a round (default: %(default)s)"
    )
    parser.add_argument(
        "--prefill-share",
        type=float,
        default=point.prefill_share,
        metavar="SHARE",
        help="prompt tokens over all tokens, from 0 to below 1 (default: %(default)s)",
    )
    parser.add_argument(
        "--context", type=int, default=point.context, metavar="TOKENS", help="of a request (default: %(default)s)"
    )
    parser.add_argument("--recording", type=Path, metavar="FILE", help="stage times from a recorded run")
    parser.add_argument("--recorded-split", metavar="N,N,...", help="layers of its stages (default: evenly split)")
    parser.add_argument("--split", metavar="N,N,...", help="show the stage times of this split too")
    parser.add_argument(
        "--burst",
        type=int,
        default=prefill.tokens,
        metavar="TOKENS",
        help="prompt tokens that arrive together, for the advice on chunks (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")


def run(args: argparse.Namespace) -> int:
    """The command."""
    stages, ranks = args.pipeline_parallel_size, args.tensor_parallel_size
    try:
        model = ModelShape.load(args.model)
        point = OperatingPoint(args.decode_rows, args.prefill_share, args.context)
        splits = {"even": even_split(len(model.layers), max(1, stages))}
        if args.split:
            splits["yours"] = parse_split(args.split, stages)
        if args.recording:
            recorded = read_recording(args.recording, model, args.recorded_split)
            plan, weigh = recorded.plan(stages), recorded.assess
        else:
            plan = plan_split(model, stages, point, ranks=ranks)
            weigh = functools.partial(assess, model, point=point, ranks=ranks)
        plans = {"even": weigh(splits.pop("even")), "plan": plan}
        plans |= {name: weigh(split) for name, split in splits.items()}
        advice = advise_chunk(model, plan.split, PrefillLoad(args.burst), ranks=ranks)
    except (ModelShapeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    basis = f"the recording {args.recording}" if args.recording else describe(point)
    if args.json:
        print(json.dumps(as_json(None if args.recording else point, plans, advice), indent=2))
    else:
        show(model, basis, plans, advice)
    return 0


def read_recording(path: Path, model: ModelShape, split: str | None) -> RecordedStages:
    """The stage times of a recorded run.

    Raises:
        ValueError: the file is no recording, or does not fit the split.
    """
    try:
        reports, _ = load(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} cannot be read as a recording: {error}") from error
    layers = parse_split(split, len(reports)) if split else even_split(len(model.layers), len(reports))
    return RecordedStages(model, layers, [r.shares["compute"] * r.seconds / r.rounds for r in reports])


def parse_split(text: str, stages: int) -> tuple[int, ...]:
    """Layers of each stage, from the form 17,15.

    Raises:
        ValueError: another form, another number of stages, or a stage without layers.
    """
    try:
        split = tuple(int(part) for part in text.split(","))
    except ValueError:
        split = ()
    if len(split) != stages or min(split, default=0) < 1:
        raise ValueError(f"a split over {stages} stages is written as {stages} numbers with commas, not {text!r}")
    return split


def as_json(point: OperatingPoint | None, plans: dict[str, Plan], advice: ChunkAdvice) -> dict:
    """What the command says, for programs. Times in seconds."""
    return {
        "operating_point": asdict(point) if point else None,
        "splits": {
            name: {"layers": list(plan.split), "stage_seconds": list(plan.seconds), "idle_share": plan.idle}
            for name, plan in plans.items()
        },
        "environment": {"VLLM_PP_LAYER_PARTITION": plans["plan"].partition},
        "chunk": asdict(advice),
    }


def describe(point: OperatingPoint) -> str:
    """An operating point in words."""
    return (
        f"an average round: {point.rows} decoding requests with {point.context} tokens of context, "
        f"{point.work.prompt_tokens:.0f} prompt tokens"
    )


def show(model: ModelShape, basis: str, plans: dict[str, Plan], advice: ChunkAdvice) -> None:
    """What the command says, for people."""
    sparse = sum(bool(layer.experts) for layer in model.layers)
    kinds = f"{len(model.layers)} layers" + (f", {sparse} of them with experts" if sparse else "")
    head = f"the head is worth {model.head * model.head_bytes / _layer_bytes(model):.1f} layers of weights"
    print(f"{kinds}; {head}{' (tied to the embedding; the last stage holds a copy)' if model.tied else ''}")
    print(f"{basis}\n")
    for name, plan in plans.items():
        times = "  ".join(f"{1000 * seconds:.2f}" for seconds in plan.seconds)
        print(f"  {name:<6} {plan.partition:<20} stage times (ms)  {times}   waiting {100 * plan.idle:.1f}%")
    even, best = plans["even"], plans["plan"]
    gain = even.slowest / best.slowest - 1
    if best.split == even.split or gain < 0.001:
        print("\nThe even split is the best one here: leave VLLM_PP_LAYER_PARTITION unset.")
    else:
        print(f"\nThe slowest stage is {100 * gain:.1f}% faster than with the even split:\n")
        print(f"  VLLM_PP_LAYER_PARTITION={best.partition}")
    print(f"\n{advice.sentence}")


def _layer_bytes(model: ModelShape) -> float:
    return sum(layer.read(32) for layer in model.layers) / len(model.layers) * model.weight_bytes
