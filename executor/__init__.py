"""The executor, its control plane and the vLLM plugin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_handoff.executor.executor import HandoffExecutor

__all__ = ["HandoffExecutor"]


def __getattr__(name: str) -> Any:
    # Lazy: importing the package must not import vLLM (and torch).
    if name == "HandoffExecutor":
        from vllm_handoff.executor.executor import HandoffExecutor

        return HandoffExecutor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
