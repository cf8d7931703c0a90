"""How fast the workers' hosts launch rounds, for the scheduler, read from their boards (see board.py)."""

from __future__ import annotations

from typing import Any

from vllm_handoff.executor.board import BoardReader, WorkerCounts, worker_board


class HostPace:
    """The pace of one engine's workers.

    Args:
        folder: where the workers' boards are.
        ranks: how many workers there are.
    """

    def __init__(self, folder: str, ranks: int) -> None:
        self._paths = [worker_board(folder, rank) for rank in range(ranks)]
        # Now, not at the first request: until then the folder may have been cleaned up by the system.
        self._boards: list[BoardReader[WorkerCounts]] | None = self._open()

    def _open(self) -> list[BoardReader[WorkerCounts]]:
        return [BoardReader(path, WorkerCounts) for path in self._paths]

    def seconds(self) -> float:
        """What launching a round that only decodes takes the slowest host; 0 if not known, and on a CPU."""
        if self._boards is None:
            self._boards = self._open()
        return max(board.read().launch_ns for board in self._boards) / 1e9

    def __getstate__(self) -> dict[str, Any]:
        # A configuration is pickled now and then, and this lies on it; mapped memory cannot be.
        return self.__dict__ | {"_boards": None}
