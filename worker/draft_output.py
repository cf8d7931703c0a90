"""A round's output that waits for the drafts proposed after it: see scheduler_ext/drafts.py."""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from vllm_handoff.scheduler_ext.drafts import attach_drafts
from vllm_handoff.worker.outputs import has_arrived, has_passed


class OutputWithDrafts(AsyncModelRunnerOutput):
    """A round's output to which its drafts are added once both have reached the host.

    Args:
        output: the round's own.
        req_ids: requests, in batch order.
        drafts: integer [rows, drafts], which a copy on the device's way fills.
        arrived: recorded behind that copy.
    """

    def __init__(
        self, output: AsyncModelRunnerOutput, req_ids: list[str], drafts: np.ndarray, arrived: torch.cuda.Event
    ) -> None:
        self._output = output
        self._req_ids = req_ids
        self._drafts = drafts
        self._arrived = arrived

    def has_arrived(self) -> bool | None:
        """See outputs.has_arrived."""
        tokens = has_arrived(self._output)
        return tokens and has_passed(self._arrived)

    def get_output(self) -> ModelRunnerOutput:
        output = self._output.get_output()
        self._arrived.synchronize()
        attach_drafts(output, dict(zip(self._req_ids, self._drafts.tolist(), strict=True)))
        return output
