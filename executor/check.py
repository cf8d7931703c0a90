"""Ask a running server for one token, and say whether it is well: for health checks.

vLLM's /health answers 200 as long as the engine's process is there, also when its
rounds stand still. This makes a token, which goes through every stage. The status
is 0 if one came, else 1 with a sentence: for instance "alive but not advancing".

The key of a server that wants one is taken from VLLM_API_KEY.

examples:
  vllm-handoff check
  vllm-handoff check --url http://127.0.0.1:8123 --timeout 20
  HEALTHCHECK CMD ["vllm-handoff", "check"]           in a Dockerfile
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from vllm_handoff.executor.health import NotHealthyError, Server


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the server's address (default: http://127.0.0.1:8000)"
    )
    parser.add_argument("--timeout", type=float, default=30, help="seconds for the token (default: 30)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a line")


def run(args: argparse.Namespace) -> int:
    server = Server(args.url, os.environ.get("VLLM_API_KEY"))
    start = time.monotonic()
    try:
        server.make_token(args.timeout)
        healthy, text = True, f"ok: a token in {time.monotonic() - start:.2f} s"
    except NotHealthyError as error:
        healthy, text = False, explain(server, error)
    if args.json:
        print(json.dumps({"ok": healthy, "found": text}))
    else:
        print(text, file=sys.stdout if healthy else sys.stderr)
    return 0 if healthy else 1


def explain(server: Server, error: NotHealthyError) -> str:
    """What is known of a server that made no token."""
    try:
        progress = server.progress()
    except NotHealthyError:
        return f"not well: {error}"
    if progress.quiet_s > 1:
        return (
            f"alive but not advancing: {progress.in_flight} rounds in flight stand still for {progress.quiet_s:.0f} s"
        )
    return f"alive, and no token: {error}"
