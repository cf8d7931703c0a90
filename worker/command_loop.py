"""A worker's loop: takes commands in order, runs them, reports their results."""

from __future__ import annotations

import logging
import os
import pickle
import time
import traceback
from contextlib import nullcontext
from typing import Any, NoReturn

from vllm_handoff.executor import pickling
from vllm_handoff.executor.board import Phase
from vllm_handoff.executor.errors import ProtocolError
from vllm_handoff.executor.messages import (
    ALL_RANKS,
    NO_ROUND,
    REPORTED_EXIT,
    Call,
    Command,
    Failure,
    Frame,
    Reply,
    Round,
    Sample,
    Shutdown,
    Welcome,
    clip,
)
from vllm_handoff.scheduler_ext import manifest
from vllm_handoff.worker.control_link import ControlLink, ReportSocket
from vllm_handoff.worker.outputs import Outputs, OutputThread
from vllm_handoff.worker.work_clock import WorkClock

logger = logging.getLogger(__name__)

_abandoned: list[ReportSocket] = []


class CommandLoop:
    """Runs one worker's commands.

    Args:
        worker: has execute_model, sample_tokens and the methods that calls name.
        link: the worker's end of the control plane.
        rank: the worker's rank.
        clock: told when commands come and end.
    """

    def __init__(self, worker: Any, link: ControlLink, rank: int, clock: WorkClock) -> None:
        self._worker = worker
        self._link = link
        self._rank = rank
        self._clock = clock
        self._next_seq = 0
        self._last_round = NO_ROUND
        # The round whose forward is done and whose grammar has yet to come, with the forward's result.
        self._deferred: tuple[Round, Any] | None = None
        self._phase = ""
        self._outputs = Outputs(
            lambda item: self._finish_output(item, self._link.reports),
            lambda: OutputThread(lambda item: self._finish_output(item, self._thread_reports), self._prepare_thread),
        )
        self._thread_reports: ReportSocket | None = None

    def run(self) -> None:
        """Serve until Shutdown. A round that raises is reported and ends the process."""
        try:
            while True:
                self._outputs.look()
                if self._outputs.waiting and not self._link.has_command():
                    self._outputs.hand_over()
                command, payload = self._link.receive()
                is_round = isinstance(command, Round)
                if not (isinstance(command, Round) and command.manifest and command.manifest.only_decodes):
                    # A prompt's layers take the host long to launch, and a call whatever it may.
                    self._outputs.hand_over()
                self._begin(command)
                if isinstance(command, Welcome) or command.seq != self._next_seq:
                    found = "a welcome" if isinstance(command, Welcome) else f"command {command.seq}"
                    raise ProtocolError(f"{found} arrived where command {self._next_seq} was due.")
                self._next_seq += 1
                if isinstance(command, Shutdown):
                    return
                self._serve(command, payload)
                self._clock.end(is_round)
        finally:
            self._close_outputs()

    def _begin(self, command: Command) -> None:
        if isinstance(command, Round):
            self._clock.begin(Phase.FORWARD, command.number, command.sent_ns)
        elif isinstance(command, Sample):
            self._clock.begin(Phase.SAMPLING, command.number)
        else:
            self._clock.begin(Phase.CALL)

    def _close_outputs(self) -> None:
        finished = self._outputs.close()
        if self._thread_reports is None:
            return
        if finished:
            # Left to the garbage collector, its context would wait for ever for a socket that nobody closes.
            self._thread_reports.close(linger_s=1)
        else:
            # Stuck on the device. No other thread may close its socket.
            _abandoned.append(self._thread_reports)

    def _serve(self, command: Command, payload: Frame | None) -> None:
        if isinstance(command, Call):
            try:
                self._finish(command, self._call(command, payload))
            except Exception as error:
                self._report_call_failure(command, error)
            return
        assert isinstance(command, Round | Sample)
        try:
            self._phase = "receiving"
            if isinstance(command, Round):
                self._round(command, payload)
            else:
                self._sample(command, payload)
        except Exception as error:
            self._fail_round(command.number, self._phase, error, self._link.reports)

    def _round(self, command: Round, payload: Frame | None) -> None:
        if command.follows != self._last_round or self._deferred is not None:
            raise ProtocolError(
                f"round {command.number} was sent to follow round {command.follows}, and this worker's last round is "
                f"{self._last_round}{' and not sampled yet' if self._deferred else ''}."
            )
        self._last_round = command.number
        assert payload is not None
        if command.shared_bytes:
            payload = self._link.shared.payload(command.shared_bytes)
        scheduler_output = pickle.loads(payload)
        if command.manifest is not None:
            manifest.attach(scheduler_output, command.manifest)
        self._phase = "execute_model"
        output = self._worker.execute_model(scheduler_output)
        if command.sampling == "deferred":
            self._deferred = (command, output)
            return
        if command.sampling == "now" and output is None:
            self._outputs.look()
            self._phase = "sample_tokens"
            self._clock.enter(Phase.SAMPLING)
            output = self._worker.sample_tokens(None)
        self._finish(command, output)

    def _sample(self, command: Sample, payload: Frame | None) -> None:
        deferred, self._deferred = self._deferred, None
        if deferred is None or deferred[0].number != command.number:
            waiting = "no round waits" if deferred is None else f"round {deferred[0].number} waits"
            raise ProtocolError(f"the grammar of round {command.number} arrived, and {waiting} for one.")
        round_, output = deferred
        assert payload is not None
        grammar = pickle.loads(payload)
        self._phase = "sample_tokens"
        self._finish(round_, self._worker.sample_tokens(grammar) if output is None else output)

    def _call(self, command: Call, payload: Frame | None) -> Any:
        assert payload is not None
        if command.pickled:
            function, args, kwargs = pickle.loads(payload)
            return function(self._worker, *args, **kwargs)
        args, kwargs = pickle.loads(payload)
        return getattr(self._worker, command.name)(*args, **kwargs)

    def _finish(self, command: Round | Call, output: Any) -> None:
        """Report a result, later if it has yet to reach the host."""
        if command.reply_rank not in (ALL_RANKS, self._rank):
            return
        if hasattr(output, "get_output"):
            self._outputs.put(command, output)
            return
        self._reply(command, output, self._link.reports)

    def _reply(self, command: Round | Call, output: Any, reports: ReportSocket) -> None:
        if output is None and isinstance(command, Round) and command.reply_rank == self._rank:
            raise RuntimeError("the worker returned no output for a round that it executed.")
        payload = pickling.dumps(output)
        reports.send(Reply(command.seq, len(payload)), payload)

    def _prepare_thread(self) -> None:
        self._thread_reports = self._link.report_socket()
        device = getattr(self._worker, "device", None)
        if device is not None:
            from vllm.platforms import current_platform

            current_platform.set_device(device)

    def _finish_output(self, item: tuple[Round | Call, Any], reports: ReportSocket | None) -> None:
        command, output = item
        assert reports is not None
        try:
            with self._clock.awaiting_output(command.number) if isinstance(command, Round) else nullcontext():
                result = output.get_output()
            self._reply(command, result, reports)
        except Exception as error:
            if isinstance(command, Call):
                reports.send(self._call_failure(command, error))
            else:
                self._fail_round(command.number, "get_output", error, reports)

    def _report_call_failure(self, command: Call, error: Exception) -> None:
        logger.exception("Call %s failed on rank %d.", command.name, self._rank)
        self._link.reports.send(self._call_failure(command, error))

    def _call_failure(self, command: Call, error: Exception) -> Failure:
        return Failure(
            fatal=False,
            where=f"call {command.name!r}"[:1024],
            phase="call",
            error=clip(f"{type(error).__name__}: {error}"),
            traceback=clip(traceback.format_exc()),
            at=time.monotonic_ns(),
            seq=command.seq,
        )

    def _fail_round(self, number: int, phase: str, error: Exception, reports: ReportSocket) -> NoReturn:
        """Report a round's exception and end the process.

        The round cannot be repeated and its peers may already wait for this
        stage, so the engine has to fail; ending here breaks their wait.
        """
        failure = Failure(
            fatal=True,
            where=f"round {number}",
            phase=phase,
            error=clip(f"{type(error).__name__}: {error}"),
            traceback=clip(traceback.format_exc()),
            at=time.monotonic_ns(),
        )
        reports.send(failure)
        logger.exception("Round %d failed in %s on rank %d.", number, phase, self._rank)
        reports.close(linger_s=2)
        logging.shutdown()
        os._exit(REPORTED_EXIT)
