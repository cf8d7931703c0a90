"""This package's log lines appear wherever vLLM's do."""

from __future__ import annotations

import logging


def join_vllm_logging() -> None:
    """Give this package's loggers vLLM's handlers and level; can be called again after vLLM's logging changed.

    vLLM configures the logger "vllm" only, so INFO lines of any other package
    would be dropped.
    """
    theirs, ours = logging.getLogger("vllm"), logging.getLogger("vllm_handoff")
    if theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate
