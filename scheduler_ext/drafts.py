"""Drafts of requests with a grammar, on their way from the last stage to the scheduler.

Which drafts a grammar allows is for the scheduler to say, and it must know them
for that. vLLM asks the last stage for those of its last round, in a call that
waits behind all rounds in flight; over stages other rounds have been sampled
since, and the answer is about other requests. Here they come with the output
that they follow, for rounds that have such a request and for no others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# The attribute of vLLM's ModelRunnerOutput that carries them; it is pickled along.
_ATTRIBUTE = "handoff_drafts"


def attach_drafts(output: Any, drafts: Mapping[str, list[int]]) -> None:
    """Make `drafts`, by request id, those that come with a ModelRunnerOutput."""
    setattr(output, _ATTRIBUTE, drafts)


def drafts_of(output: Any) -> Mapping[str, list[int]]:
    """The drafts that came with a ModelRunnerOutput, by request id; empty if none did."""
    drafts: Mapping[str, list[int]] = getattr(output, _ATTRIBUTE, {})
    return drafts
