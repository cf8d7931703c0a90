"""Errors of the executor. Each message names the stage, the round or call, and the remedy."""

from __future__ import annotations


class ExecutorFailedError(RuntimeError):
    """The executor has failed for good: a worker died, or a round raised on some stage."""


class WorkerStartError(ExecutorFailedError):
    """A worker could not start."""


class WorkerCallError(RuntimeError):
    """A collective_rpc call raised on a worker. The executor goes on working."""


class ProtocolError(RuntimeError):
    """A control-plane message is corrupt, truncated, oversized or of an unknown kind."""
