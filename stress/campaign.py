"""A whole run: one engine life after the other, until the time is over or something is wrong."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_handoff.stress.checks import Expected, Oracle, Problem, reference_oracle
from vllm_handoff.stress.faults import FAULTS, Fault, struck_rank
from vllm_handoff.stress.figures import FaultFigures, Figures
from vllm_handoff.stress.life import Life
from vllm_handoff.stress.plan import REFERENCE, Case, Mix, concurrent_with
from vllm_handoff.stress.session import Session

START_S = 600.0
# For everything under way to be answered, and for an engine to end in order.
DRAIN_S = 120.0
END_S = 30.0
# A fault that has no effect at all for so long is not noticed.
UNNOTICED_S = 30.0
NO_FAULT = "none"


@dataclass
class Campaign:
    """What to run.

    Args:
        setup: what child.py starts.
        environment: variables for it.
        mix: the load.
        oracle: the right answers; None if they come from running the pool's requests one by one.
        folder: for logs.
        seconds: how long to run, starts of engines included.
        faults: names of the faults to inject, in turns, each ending a life; NO_FAULT, or an empty list: one life
            that lasts until the end.
        fault_after: how long an engine is under load before its fault, least and most.
        start_strike_s: how long after its workers have come an engine that starts is struck, at most.
    """

    setup: dict[str, Any]
    environment: dict[str, str]
    mix: Mix
    oracle: Oracle | None
    folder: Path
    seconds: float
    faults: list[str] = field(default_factory=list)
    fault_after: tuple[float, float] = (3.0, 12.0)
    progress: Callable[[int, str], None] = lambda tokens, what: None
    figures: Figures = field(default_factory=Figures)
    start_strike_s: float = 1.0
    failed_case: Case | None = None
    about_failure: list[int] = field(default_factory=list)

    def run(self) -> Figures:
        """Run until the time is over, or until something is wrong."""
        rng = random.Random(f"{self.mix.seed}/faults")
        begin = time.monotonic()
        deadline, life, longest_start = begin + self.seconds, 0, 0.0
        try:
            # A life that could do no more than start is not begun.
            while not self.figures.problems and (not life or deadline - time.monotonic() > longest_start + 5):
                fault = self.faults[life % len(self.faults)] if self.faults else NO_FAULT
                longest_start = max(longest_start, self._life(life, fault, deadline, rng))
                life += 1
                if fault == NO_FAULT:
                    break
        finally:
            self.figures.seconds = time.monotonic() - begin
        return self.figures

    def open_life(self) -> Life | None:
        """Start an engine; None (and a problem) if it does not come up."""
        self.progress(0, "starting")
        life = Life(self.setup, self.environment, self.folder / "engine.log")
        try:
            ready = life.wait_ready(START_S)
        except BaseException:
            # Ctrl-C while it starts.
            life.bury()
            raise
        if ready:
            self.figures.lives += 1
            return life
        self.figures.problems.append(Problem("start", f"the engine did not start; its log ends:\n{life.last_words()}"))
        life.bury()
        return None

    def _life(self, number: int, fault: str, deadline: float, rng: random.Random) -> float:
        if fault != NO_FAULT and FAULTS[fault].at_start:
            return self._strike_start(fault, rng)
        begin = time.monotonic()
        life = self.open_life()
        if life is None:
            return 0.0
        took = time.monotonic() - begin
        try:
            if self.oracle is None:
                self._learn(life)
            if self.figures.problems:
                return took
            assert self.oracle is not None
            session = Session(
                life, Case(self.mix, number), self.oracle, self.figures, lambda tokens: self.progress(tokens, "load")
            )
            session.start()
            after, now = rng.uniform(*self.fault_after), time.monotonic()
            if fault == NO_FAULT or now + after > deadline:
                self._until_the_end(life, session, deadline)
            else:
                session.follow(now + after)
                # A fault in an engine with nothing to do is another story: wait for work.
                session.follow(deadline, stop=lambda: len(session.pending) > 1)
                if not (session.problems or session.dead):
                    self._strike(life, session, fault, rng)
            if session.problems:
                self.figures.problems += session.problems
                self._remember(session, number)
            elif session.dead and not session.struck:
                self._problem("exit", f"the engine's process ended with {life.exit_status()}:\n{life.last_words()}")
                self._remember(session, number)
        finally:
            life.bury()
        return took

    def _problem(self, kind: str, what: str) -> None:
        self.figures.problems.append(Problem(kind, what))

    def _learn(self, life: Life) -> None:
        """Run each request of the pool alone, and take what comes for right."""
        alone = replace(self.mix, outstanding=1)
        case = Case(alone, REFERENCE, tuple(range(self.mix.pool)))
        session = Session(
            life, case, reference_oracle({}), Figures(), lambda tokens: self.progress(tokens, "reference")
        )
        session.start()
        session.follow(time.monotonic() + START_S)
        if not session.done or session.problems:
            self._problem("start", f"the requests did not run one by one: {session.problems}\n{life.last_words()}")
            return
        self.oracle = reference_oracle({number: Expected(*found) for number, found in session.answers.items()})

    def _until_the_end(self, life: Life, session: Session, deadline: float) -> None:
        # Caches fill in the beginning.
        begin = time.monotonic()
        session.follow(begin + (deadline - begin) / 3)
        before, since = life.memory(), time.monotonic()
        session.follow(deadline)
        self.figures.note_memory(before, life.memory(), time.monotonic() - since)
        life.order({"stop": True})
        session.follow(time.monotonic() + DRAIN_S)
        if session.problems or session.dead:
            return
        if not session.done:
            self._problem("unanswered", f"{len(session.pending)} requests had no answer after {DRAIN_S:.0f} s")
            return
        life.look()
        life.order({"quit": True})
        if life.wait_gone(END_S) is None:
            self._problem("exit", f"the engine had not ended {END_S:.0f} s after it was told to")
        elif life.exit_status() != 0:
            self._problem("exit", f"the engine ended with {life.exit_status()}:\n{life.last_words()}")
        self._look_for_leaks(life, "an orderly end")

    def _strike(self, life: Life, session: Session, name: str, rng: random.Random) -> None:
        fault = FAULTS[name]
        figures = self.figures.faults.setdefault(name, FaultFigures())
        self.progress(0, name)
        life.look()
        session.struck = True
        figures.injected += 1
        rank = struck_rank(fault, life.pids, rng)
        begin = time.monotonic()
        fault.inject(life.pids, rank, life.order)
        where = f"{fault.what} (rank {rank})"
        if fault.loses_clients:
            session.follow(begin + UNNOTICED_S)
        else:
            errors = self.figures.errors
            session.follow(begin + UNNOTICED_S, stop=lambda: self.figures.errors > errors and not session.pending)
            if session.problems:
                return
            begin = life.struck_at() or begin
            self._answered(session, fault, where, begin, figures)
        if self.figures.problems:
            return
        gone = life.wait_gone(max(0.0, begin + fault.limit_s + END_S - time.monotonic()))
        if gone is None:
            self._problem("leak", f"after {where}: processes were left {END_S:.0f} s later")
        took = time.monotonic() - begin
        figures.longest_gone_s = max(figures.longest_gone_s, took)
        if fault.loses_clients and gone is not None:
            figures.longest_s = max(figures.longest_s, took)
            figures.detected += took <= fault.limit_s
            if took > fault.limit_s:
                self._problem("slow", f"after {where} it took {took:.1f} s until no process was left")
        self._look_for_leaks(life, where)

    def _strike_start(self, name: str, rng: random.Random) -> float:
        """Start an engine, and strike it before it is ready. How long that took."""
        fault = FAULTS[name]
        figures = self.figures.faults.setdefault(name, FaultFigures())
        self.progress(0, name)
        begin = time.monotonic()
        life = Life(self.setup, self.environment, self.folder / "engine.log")
        try:
            workers = self.setup["options"].get("pipeline_parallel_size", 1)
            workers *= self.setup["options"].get("tensor_parallel_size", 1)
            if not life.wait_workers(workers, START_S):
                self._problem("start", f"no workers came; the log ends:\n{life.last_words()}")
                return 0.0
            # Anywhere from the workers' first breath to their warm-up.
            time.sleep(rng.uniform(0.0, self.start_strike_s))
            life.look()
            struck = time.monotonic()
            figures.injected += 1
            rank = struck_rank(fault, life.pids, rng)
            where = f"{fault.what} (rank {rank})"
            with contextlib.suppress(ProcessLookupError):
                fault.inject(life.pids, rank, life.order)
            # An engine that was ready a moment before waits for orders.
            was_ready = bool(life.event(0.0))
            life.order({"quit": True})
            gone = life.wait_gone(fault.limit_s + END_S)
            took = time.monotonic() - struck
            figures.longest_gone_s = max(figures.longest_gone_s, took)
            if gone is None:
                self._problem("leak", f"after {where}: processes were left {took:.0f} s later")
            elif took > fault.limit_s:
                self._problem("slow", f"after {where} it took {took:.1f} s until no process was left")
            elif life.exit_status() == 0 and not was_ready:
                self._problem("exit", f"after {where} the process ended with 0:\n{life.last_words()}")
            else:
                figures.detected += 1
            self._look_for_leaks(life, where)
        finally:
            life.bury()
        return time.monotonic() - begin

    def _answered(self, session: Session, fault: Fault, where: str, begin: float, figures: FaultFigures) -> None:
        """Whether every request was over in time after a fault."""
        if session.pending:
            kind = "undetected" if not session.dead else "unanswered"
            self._problem(kind, f"after {where}: {len(session.pending)} requests without an answer or an error")
            return
        took = session.last_end - begin
        figures.longest_s = max(figures.longest_s, took)
        if took > fault.limit_s:
            self._problem("slow", f"after {where} it took {took:.1f} s until every request was over")
        else:
            figures.detected += 1

    def _look_for_leaks(self, life: Life, after: str) -> None:
        leaks = life.leaks()
        self.figures.leaks += leaks
        if leaks:
            self._problem("leak", f"after {after} there were left: {', '.join(leaks[:10])}")

    def _remember(self, session: Session, life: int) -> None:
        """Keep what was sent in this life, and what was about when it went wrong."""
        spans = session.spans | {number: (sent, time.monotonic()) for number, sent in session.pending.items()}
        self.failed_case = Case(self.mix, life, tuple(sorted(spans)))
        failed = [problem.number for problem in session.problems if problem.number is not None]
        self.about_failure = concurrent_with(spans, failed or list(session.pending))
