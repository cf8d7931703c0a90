"""The entry point of a worker process: one rank of one stage, from its start to its end."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn

from vllm_handoff.executor.board import Board, WorkerCounts, worker_board
from vllm_handoff.executor.folder import remove_folder
from vllm_handoff.executor.messages import REPORTED_EXIT, Failure, Ready, clip
from vllm_handoff.worker import work_clock
from vllm_handoff.worker.command_loop import CommandLoop
from vllm_handoff.worker.control_link import ControlLink
from vllm_handoff.worker.parent_watch import watch_parent
from vllm_handoff.worker.work_clock import WorkClock

logger = logging.getLogger(__name__)

# Makes a worker write where each of its threads is to its standard error.
STACKS_SIGNAL = signal.SIGUSR2


@dataclass
class WorkerLaunch:
    """All that a worker process is started with. Pickled to a spawned one.

    Attributes:
        rank: the worker's rank in the executor.
        build: makes the worker, given `build_kwargs`; runs in the worker process,
            after the control plane is up, so that what it raises is reported.
            The worker has execute_model, sample_tokens, the methods that calls
            name, shutdown, and, if it has one, `device`.
        folder: where the executor's sockets are.
        token: proves this worker to the executor and the executor to it.
        parent_pid: the process that must be alive for this one to be.
        life: a pipe that reads EOF when that process ends.
        close_fds: descriptors that a fork inherits and must not keep.
    """

    rank: int
    build: Callable[..., Any]
    build_kwargs: dict[str, Any]
    folder: str
    token: bytes = field(repr=False)
    parent_pid: int
    life: Connection | None = None
    close_fds: tuple[int, ...] = ()


def worker_main(launch: WorkerLaunch) -> None:
    """Run a worker until it is told to shut down, fails, or loses its parent."""
    # A process group of its own: Ctrl-C in a terminal reaches the engine only,
    # which ends its workers in order, and the group can be killed with all its children.
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    for fd in launch.close_fds:
        with contextlib.suppress(OSError):
            os.close(fd)
    # What a fork inherits lives as long as it does. vLLM collects garbage five
    # times while it loads a model, which took half a second each, and a copy of
    # every page that was looked at.
    gc.freeze()
    _install_signal_handlers()
    assert launch.life is not None
    # An engine that was killed leaves its folder to its workers.
    watch_parent(launch.life, launch.parent_pid, before_end=lambda: remove_folder(launch.folder))

    link = ControlLink(launch.rank, launch.folder, launch.token)
    worker = None
    try:
        link.meet_executor()
        try:
            board = Board(worker_board(launch.folder, launch.rank), WorkerCounts())
            worker = launch.build(**launch.build_kwargs)
            # After what the start has launched: its rounds are nobody's.
            clock = work_clock.install(WorkClock(board.write))
        except Exception as error:
            logger.exception("Worker %d failed to start.", launch.rank)
            _report_and_exit(link, "start", error)
        link.reports.send(Ready())
        try:
            CommandLoop(worker, link, launch.rank, clock).run()
        except Exception as error:
            logger.exception("Worker %d lost its control plane.", launch.rank)
            _report_and_exit(link, "control plane", error)
    except SystemExit:
        logger.debug("Worker %d was asked to terminate.", launch.rank)
    finally:
        if worker is not None:
            with contextlib.suppress(Exception):
                worker.shutdown()
        link.close(linger_s=1)
    # Taking torch and Triton down costs a spawned process seconds of computing, for nothing.
    _exit_now(0)


def _exit_now(code: int) -> NoReturn:
    """End the process without unwinding, its output written."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def _report_and_exit(link: ControlLink, where: str, error: BaseException) -> NoReturn:
    """Report why this worker ends and end it, without unwinding.

    The peers may wait for this worker in a collective whose teardown would wait for them.
    """
    failure = Failure(
        fatal=True,
        where=where,
        phase=where,
        error=clip(f"{type(error).__name__}: {error}"),
        traceback=clip(traceback.format_exc()),
        at=time.monotonic_ns(),
    )
    link.reports.send(failure)
    link.close(linger_s=2)
    _exit_now(REPORTED_EXIT)


def _install_signal_handlers() -> None:
    """SIGTERM unwinds once; SIGINT is the engine's to act on."""
    # A fork inherits the engine's handlers and wakeup descriptor.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    terminating = False

    def terminate(signum: int, frame: FrameType | None) -> None:
        nonlocal terminating
        if not terminating:
            terminating = True
            raise SystemExit(0)

    signal.signal(signal.SIGTERM, terminate)
    # The executor asks when a round is overdue. Works while a thread is stuck in a C++ call, as no other handler does.
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)
