"""What the stress harness adds to a worker: counts of its rounds, and faults on demand.

vLLM mixes it into the worker class (`worker_extension_cls`). Importing it is
also what makes the toy model known in a worker process. Nothing here is in use
outside the harness.
"""

from __future__ import annotations

import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vllm_handoff.scheduler_ext.manifest import Manifest, attach, manifest_of
from vllm_handoff.stress import toy_model
from vllm_handoff.stress.faults import STRUCK_FILE

toy_model.register()


_FOR_EVER = 10**13  # GPU clock cycles: more than an hour


class PlantedFault(RuntimeError):
    """Raised on purpose by the stress harness."""


class StressExtension:
    """Methods that the harness calls on every rank. Their names must not be ones of vLLM's worker."""

    def stress_begin(self) -> dict[str, Any]:
        """Start counting; which process is this?"""
        worker: Any = self
        worker._stress = _Watch(worker)
        return {"rank": worker.rank, "pid": os.getpid()}

    def stress_counts(self) -> dict[str, int]:
        """Counts of this rank's rounds since stress_begin."""
        counts: dict[str, int] = self._stress.counts  # type: ignore[attr-defined]
        return counts

    def stress_arm(self, ranks: list[int], what: str) -> None:
        """Let a fault happen on these ranks in the next round that it can happen in."""
        worker: Any = self
        if worker.rank in ranks:
            worker._stress.arm(what)


class _Watch:
    """Stands between vLLM's wrapper and the worker's methods, on one worker."""

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self._execute, self._sample = worker.execute_model, worker.sample_tokens
        self._armed: str | None = None
        self._wait_rounds = 0
        self.counts = {"rounds": 0, "handoffs": 0, "tokens": 0}
        # As attributes of the object, they shadow the methods of its class.
        worker.execute_model, worker.sample_tokens = self.execute_model, self.sample_tokens

    def arm(self, what: str) -> None:
        if what == "control":
            _trusted_socket()._socket.send(b"\x93garbage")
            _note_time()
        elif what == "twice":
            _answer_twice(_trusted_socket())
        else:
            # Not in the very round that follows: several are in flight by then.
            self._armed, self._wait_rounds = what, 3

    def _due(self, *kinds: str) -> str | None:
        if self._armed in kinds and self._wait_rounds <= 0:
            what, self._armed = self._armed, None
            _note_time()
            return what
        return None

    def execute_model(self, scheduler_output: Any) -> Any:
        manifest = manifest_of(scheduler_output)
        tokens = scheduler_output.total_num_scheduled_tokens
        self.counts["rounds"] += 1
        self.counts["tokens"] += tokens
        self._wait_rounds -= 1
        if manifest is not None and manifest.handoff:
            self.counts["handoffs"] += 1
            if self._due("manifest"):
                self._disagree(scheduler_output, manifest)
        if tokens and self._due("raise-forward"):
            raise PlantedFault("raised by the stress harness in the forward of a round")
        if tokens and self._due("memory"):
            raise torch.OutOfMemoryError("planted by the stress harness in the forward of a round")
        if tokens and self._due("hang"):
            # Alive, and never back; what a kernel or a collective that never ends looks like from outside.
            threading.Event().wait()
        if tokens and self._due("kernel"):
            # Its host goes on, its device does not.
            torch.cuda._sleep(_FOR_EVER)
        return self._execute(scheduler_output)

    def _disagree(self, scheduler_output: Any, manifest: Manifest) -> None:
        # Another round's number: what this stage sends is not what its peer expects.
        import msgspec

        attach(scheduler_output, msgspec.structs.replace(manifest, round=manifest.round + 1))

    def sample_tokens(self, grammar_output: Any) -> Any:
        if self._due("raise-sample"):
            raise PlantedFault("raised by the stress harness while a round is sampled")
        output = self._sample(grammar_output)
        if hasattr(output, "get_output") and (what := self._due(*_TAMPER)):
            return _Tampered(output, what, rearm=self.arm)
        return output


def _note_time() -> None:
    # An order waits behind the rounds in flight, which take seconds while kernels are compiled: a fault is to be
    # noticed soon after it happens, not after it was ordered.
    Path(tempfile.gettempdir(), STRUCK_FILE).write_text(str(time.monotonic()))


class _Tampered:
    """A round's output that is changed on its way to the host."""

    def __init__(self, output: Any, what: str, rearm: Callable[[str], None]) -> None:
        self._output = output
        self._what = what
        self._rearm = rearm

    def get_output(self) -> Any:
        output = self._output.get_output()
        if not _TAMPER[self._what](output.sampled_token_ids):
            # This round had nothing that could be changed so; try a later one.
            self._rearm(self._what)
        return output


def _raise(rows: list) -> bool:
    raise PlantedFault("raised by the stress harness while an output is copied")


def _swap(rows: list) -> bool:
    full = [index for index, row in enumerate(rows) if len(row)]
    for one, other in zip(full, full[1:]):
        if rows[one] != rows[other]:
            rows[one], rows[other] = rows[other], rows[one]
            return True
    return False


_TAMPER: dict[str, Callable[[list], bool]] = {"raise-output": _raise, "swapped": _swap}


def _answer_twice(reports: Any) -> None:
    """Let the next reply of this worker's main thread be sent twice."""
    from vllm_handoff.executor.messages import Reply

    send = reports.send

    def twice(report: Any, payload: bytes | None = None) -> None:
        send(report, payload)
        if isinstance(report, Reply):
            del reports.send
            send(report, payload)
            _note_time()

    reports.send = twice


def _trusted_socket() -> Any:
    """This worker's own socket for reports, which the executor trusts."""
    from vllm_handoff.worker.control_link import ReportSocket

    # Some of the process's objects are frozen, which hides them.
    gc.unfreeze()
    for found in gc.get_objects():
        if isinstance(found, ReportSocket):
            return found
    raise RuntimeError("this worker has no report socket")
