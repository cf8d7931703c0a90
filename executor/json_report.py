"""`--json` of the commands that talk while they work: the report to a file, or alone on standard output."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_STDOUT = "-"


def add_argument(parser: Any) -> None:
    """`--json` or `--json FILE`."""
    parser.add_argument(
        "--json",
        nargs="?",
        const=_STDOUT,
        metavar="FILE",
        help="write the report as one JSON object to FILE; without FILE to standard output, and the text to stderr",
    )


@contextlib.contextmanager
def report_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A report to fill in, written when the block ends; meanwhile standard output is left to it, if it goes there."""
    report: dict[str, Any] = {}
    if args.json == _STDOUT:
        with contextlib.redirect_stdout(sys.stderr):
            yield report
    else:
        yield report
    # A command that found out nothing has nothing to report: it has said why.
    if not args.json or not report:
        return
    text = json.dumps(report, indent=1, default=str) + "\n"
    if args.json == _STDOUT:
        sys.stdout.write(text)
    else:
        Path(args.json).write_text(text)
