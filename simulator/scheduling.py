"""What an engine's scheduler does, reduced to what decides who shares a round: two policies over one core.

The core is vLLM's order: running requests first, then waiting ones, within a
token budget, a maximum of running requests and the KV space. The policies
differ in when a decoding request may be in a round again.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from vllm_handoff.scheduler_ext.policy import EvenRounds, PipelineTime
from vllm_handoff.scheduler_ext.prefill_chunks import PrefillChunks
from vllm_handoff.scheduler_ext.stage_cost import RoundWork
from vllm_handoff.simulator.requests import SimulatedRequest

BLOCK = 16  # tokens of a KV block
_NEVER = 1 << 60


@dataclass(frozen=True)
class Limits:
    """What a round and the engine may hold.

    Attributes:
        tokens: of a round (max_num_batched_tokens), which is also the longest prefill chunk.
        requests: running at once (max_num_seqs).
        kv_tokens: KV space in tokens; None: as much as is asked for.
    """

    tokens: int = 8192
    requests: int = 512
    kv_tokens: int | None = None


class Row(NamedTuple):
    """A request's part in a round."""

    request: SimulatedRequest
    generation: int
    tokens: int
    samples: bool


@dataclass
class SimulatedRound:
    """One output of the scheduler.

    Attributes:
        number: from 0, empty rounds included.
        rows: its requests, in the order of scheduling.
        work: what the stages have to do.
        needs: the newest round whose tokens it decodes, -1 if none.
        live: requests that were decoding when it was planned, those whose last round is in flight too.
        begins, ends: for each stage, when its device began and ended it, in seconds.
        output: when the engine can collect it, in seconds.
    """

    number: int
    rows: list[Row]
    work: RoundWork
    needs: int
    live: int
    begins: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    output: float = 0.0

    @property
    def decodes(self) -> int:
        return int(self.work.rows)

    @property
    def tokens(self) -> int:
        return int(self.work.rows + self.work.prompt_tokens)


class SimulatedScheduler:
    """vLLM 0.32: a request is eligible again `stages` steps after it was scheduled, ready or not.

    Args:
        stages: pipeline stages.
        limits: of a round and of the engine.
    """

    def __init__(self, stages: int, limits: Limits) -> None:
        self.stages = stages
        self.limits = limits
        self.step = 0
        self.waiting: deque[SimulatedRequest] = deque()
        self.running: dict[int, SimulatedRequest] = {}
        self.free_blocks = 1 << 60 if limits.kv_tokens is None else limits.kv_tokens // BLOCK
        self.preemptions = 0
        self.wasted_rows = 0  # sampled for requests that had ended, or were preempted, by then
        self._rounds = 0

    @property
    def unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, requests: Iterable[SimulatedRequest]) -> None:
        """Requests that have arrived.

        Raises:
            ValueError: one that no round could ever hold.
        """
        for request in requests:
            needed = -(-(request.prompt + request.budget) // BLOCK)
            if self.limits.kv_tokens is not None and needed > self.limits.kv_tokens // BLOCK:
                raise ValueError(f"request {request.number} needs {needed} KV blocks, more than there are")
            request.prefill = request.prompt
            self.waiting.append(request)

    def abort(self, request: SimulatedRequest) -> None:
        """Drop a request, wherever it is; its rows in flight come back to nobody."""
        request.generation += 1
        if self.running.pop(request.number, None) is not None:
            self._free(request)
        elif request in self.waiting:
            self.waiting.remove(request)

    def schedule(self) -> SimulatedRound:
        """The next round."""
        live = sum(request.computed >= request.prefill for request in self.running.values())
        rows = self._plan()
        made = self._round(rows, live)
        for row in rows:
            self._mark(row, made.number)
        return made

    def update(self, round_: SimulatedRound, now: float) -> list[SimulatedRequest]:
        """Collect a round's tokens. The requests that it ends."""
        ended: list[SimulatedRequest] = []
        for request, generation, _, samples in round_.rows:
            if not samples:
                continue
            if request.generation != generation or request.finished:
                self.wasted_rows += 1
                continue
            request.times.append(now)
            if request.known >= request.length:
                del self.running[request.number]
                self._free(request)
                ended.append(request)
        return ended

    def _plan(self) -> list[Row]:
        """Choose the next round's requests and give them their KV space."""
        self.step += 1
        tokens, rows, preempted = self.limits.tokens, [], False
        for request in [r for r in self.running.values() if r.eligible <= self.step]:
            if not tokens or request.number not in self.running:
                break  # the round is full, or this request and all after it were preempted
            count = min(request.prefill - request.computed, tokens) if request.computed < request.prefill else 1
            while not self._allocate(request, count):
                victim = next(reversed(self.running.values()))
                self._preempt(victim)
                preempted = True
                if victim is request:
                    break
            if request.number not in self.running:
                break
            tokens -= count
            rows.append(self._take(request, count))
        while self.waiting and tokens and len(self.running) < self.limits.requests and not preempted:
            request = self.waiting[0]
            count = min(request.prefill - request.computed, tokens)
            if not self._allocate(request, count):
                break
            self.waiting.popleft()
            self.running[request.number] = request
            tokens -= count
            rows.append(self._take(request, count))
        return rows

    def _take(self, request: SimulatedRequest, count: int) -> Row:
        request.computed += count
        return Row(request, request.generation, count, request.computed >= request.prefill)

    def _mark(self, row: Row, number: int) -> None:
        """Note on the request that round `number` holds it."""
        request = row.request
        request.rounds.append(number)
        if not row.samples:
            return
        if request.newest_round >= 0:
            request.longest_wait = max(request.longest_wait, number - request.newest_round)
        request.newest_round = number
        request.planned += 1
        request.eligible = self.step + self.stages if request.planned < request.budget else _NEVER

    def _round(self, rows: list[Row], live: int) -> SimulatedRound:
        decodes = prompt = samples = context = prompt_context = 0
        needs = -1
        for request, _, count, sampled in rows:
            samples += sampled
            if request.computed > request.prefill:
                decodes += 1
                context += request.computed
                needs = max(needs, request.newest_round)
            else:
                prompt += count
                prompt_context += count * (request.computed - count // 2)
        made = SimulatedRound(
            self._rounds, rows, RoundWork(decodes, prompt, samples, context, prompt_context), needs, live
        )
        self._rounds += 1
        return made

    def _allocate(self, request: SimulatedRequest, count: int) -> bool:
        more = -(-(request.computed + count) // BLOCK) - request.blocks
        if more > self.free_blocks:
            return False
        request.blocks += more
        self.free_blocks -= more
        return True

    def _free(self, request: SimulatedRequest) -> None:
        self.free_blocks += request.blocks
        request.blocks = 0

    def _preempt(self, request: SimulatedRequest) -> None:
        """Take a request's KV space; it starts over with the tokens that it has so far as part of its prompt."""
        del self.running[request.number]
        self._free(request)
        self.waiting.appendleft(request)
        self.preemptions += 1
        request.generation += 1
        request.computed, request.planned = 0, request.known
        request.prefill = request.prompt + request.known
        request.eligible, request.newest_round = 0, -1


class EvenScheduler(SimulatedScheduler):
    """HandoffScheduler's rules, with the same EvenRounds.

    Args:
        stages: pipeline stages.
        limits: of a round and of the engine.
        split_from: live decoding requests from which they are spread over `stages` rounds; None: `time` decides.
        gather: below that number, all decoding requests come to share every round.
        chunks: sizes prefill chunks; None: the token budget alone does.
        time: of the stages; None: unless `split_from` says so, nothing is spread.
    """

    def __init__(
        self,
        stages: int,
        limits: Limits,
        split_from: int | None,
        gather: bool = True,
        chunks: PrefillChunks | None = None,
        time: PipelineTime | None = None,
    ) -> None:
        super().__init__(stages, limits)
        self.policy = EvenRounds(stages, split_from, time)
        self.gather = gather
        self.chunks = chunks

    def _plan(self) -> list[Row]:
        whole, self.limits = self.limits, replace(self.limits, tokens=self._round_budget())
        try:
            return self._plan_within_budget()
        finally:
            self.limits = whole

    def _round_budget(self) -> int:
        if self.chunks is None:
            return self.limits.tokens
        prefill = [request for request in self.running.values() if not request.decodes]
        admissible = max(0, self.limits.requests - len(self.running))
        prompts = itertools.chain(prefill, itertools.islice(self.waiting, admissible))
        waiting = sum(request.prefill - request.computed for request in prompts)
        return min(self.limits.tokens, len(self.running) - len(prefill) + self.chunks.size(waiting))

    def _plan_within_budget(self) -> list[Row]:
        self._spread()
        rows = super()._plan()
        if not rows and self._release():
            self._spread()
            rows = super()._plan()
        return rows

    def _spread(self) -> None:
        upcoming = self.step + 1
        decoding = [request for request in self.running.values() if request.computed >= request.prefill]
        live = len(decoding)
        decoding = [request for request in decoding if request.eligible != _NEVER]
        self.policy.context = sum(request.computed for request in decoding) / max(1, len(decoding))
        lead = self.policy.lead(live, self._rounds, self._prefill_is_due()) if self.gather else 0
        ready = [request for request in decoding if request.eligible <= upcoming + lead]
        late = self.policy.hold_back([(r.eligible, str(r.number)) for r in ready], live, self._rounds)
        for request in ready:
            request.eligible = min(request.eligible, upcoming)
        for number in late:
            self.running[int(number)].eligible = upcoming + 1

    def _prefill_is_due(self) -> bool:
        if self.waiting and len(self.running) < self.limits.requests:
            return True
        return any(not request.decodes for request in self.running.values())

    def _release(self) -> bool:
        held_back = [r.eligible for r in self.running.values() if self.step < r.eligible < _NEVER]
        if not held_back:
            return False
        soonest = min(held_back)
        for request in self.running.values():
            if request.eligible == soonest:
                request.eligible = 0
        return True
