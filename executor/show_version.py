"""Say which versions are installed, and whether vLLM will load the executor.

Exits with 1 if something is missing or unsupported, and says what to do.

examples:
  vllm-handoff version
  vllm-handoff version --json | jq -r .vllm
  VLLM_PLUGINS=lora_filesystem_resolver vllm-handoff version     shows why a plugin is not loaded
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from importlib.metadata import PackageNotFoundError, entry_points, version

from vllm_handoff.executor.plugin import PLUGIN_NAME
from vllm_handoff.executor.version import SUPPORTED_RANGE, UnsupportedVllmError, check_vllm_version


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def _version_of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "not installed"


def plugin_problem() -> str | None:
    """Why vLLM would not load the plugin, with the remedy; None if it would."""
    if not any(entry.name == PLUGIN_NAME for entry in entry_points(group="vllm.general_plugins")):
        return (
            "vllm-handoff's entry point is not installed: install the package with pip (a copied folder is not enough)."
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and PLUGIN_NAME not in allowed.split(","):
        return f"VLLM_PLUGINS={allowed!r} leaves the plugin out: add {PLUGIN_NAME} to it, or unset it."
    return None


def run(args: argparse.Namespace) -> int:
    problems = []
    try:
        vllm = check_vllm_version()
    except UnsupportedVllmError as error:
        vllm = "not supported"
        problems.append(str(error))
    problem = plugin_problem()
    if problem:
        problems.append(problem)
    found = {
        "vllm_handoff": _version_of("vllm-handoff"),
        "vllm": vllm,
        "supported": SUPPORTED_RANGE,
        "torch": _version_of("torch"),
        "python": sys.version.split()[0],
        "plugin_loaded": not problem,
        "problems": problems,
    }
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print(f"vllm-handoff  {found['vllm_handoff']}")
        print(f"vLLM          {vllm} (supported: {SUPPORTED_RANGE})")
        print(f"torch         {found['torch']}")
        print(f"Python        {found['python']}")
        print(f"plugin        {'not loaded by vLLM' if problem else 'loaded by vLLM'}")
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0
