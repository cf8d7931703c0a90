"""The command `vllm-handoff`.

To add a command, write a module in this package with a docstring (its help),
`add_arguments(parser)` and `run(args) -> int`, and add a line to COMMANDS. The
modules are imported to print help, so they import vLLM and torch only when run.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import signal
import sys
from types import FrameType

COMMANDS: dict[str, str] = {
    "bench": "vllm_handoff.benchmarks.bench",
    "check": "vllm_handoff.executor.check",
    "demo": "vllm_handoff.executor.demo",
    "doctor": "vllm_handoff.executor.doctor",
    "plan": "vllm_handoff.executor.plan",
    "simulate": "vllm_handoff.simulator.simulate",
    "serve": "vllm_handoff.executor.serve",
    "timeline": "vllm_handoff.executor.timeline",
    "stress": "vllm_handoff.stress.stress",
    "version": "vllm_handoff.executor.show_version",
}

DESCRIPTION = """\
Tools around vllm-handoff, the vLLM executor that makes asynchronous scheduling
and pipeline parallelism work together. The executor itself needs none of them:

  vllm serve MODEL --pipeline-parallel-size 2 \\
      --distributed-executor-backend vllm_handoff.executor.HandoffExecutor
"""

EPILOG = """\
examples:
  vllm-handoff demo --help       what the demo does and what it can be told
  vllm-handoff serve --help      run the server as a service, watched
  vllm-handoff doctor            is this machine fit for it, and what to do if not
  vllm-handoff version           is everything here that the executor needs?
"""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-handoff",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, path in COMMANDS.items():
        module = importlib.import_module(path)
        # Laid out by its author, in the source and here alike.
        text = inspect.cleandoc(module.__doc__ or "")
        command = commands.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    # As an exception, so that a command cleans up just as after Ctrl-C.
    raise SystemExit(128 + signal.SIGTERM)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status."""
    args = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminate)
    try:
        status: int = args.run(args)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return status


if __name__ == "__main__":
    sys.exit(main())
