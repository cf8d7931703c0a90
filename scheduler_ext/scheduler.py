"""The schedulers: which requests share a round."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from vllm_handoff.scheduler_ext.engine_share import SETS_THE_PACE, EngineShare
from vllm_handoff.scheduler_ext.kv_room import skip_where_there_is_room
from vllm_handoff.scheduler_ext.manifest_mixin import ManifestMixin
from vllm_handoff.scheduler_ext.policy import EvenRounds, StageTime
from vllm_handoff.scheduler_ext.prefill_chunks import PrefillChunks
from vllm_handoff.scheduler_ext.settings import HandoffSettings
from vllm_handoff.scheduler_ext.stage_time import pace_of, time_of

logger = init_logger(__name__)

# Later than any step: a request that must not be scheduled again.
_NEVER = 1 << 60
# Rounds from one look at the hosts' pace and the requests' context to the next.
_LOOK_AT_PACE = 64


class HandoffScheduler(ManifestMixin, AsyncScheduler):
    """vLLM's asynchronous scheduler with manifests and even rounds, which skips no ready request for work in flight.

    vLLM keeps a decoding request out of the next `pipeline_parallel_size`
    rounds by a step counter, ready or not. Here the counter only spreads
    requests over rounds: EvenRounds decides from how many on and how many
    share one; below that all come to share every round. It is overruled
    whenever obeying it would leave a round empty, since a token that is still being
    sampled arrives by handoff and is waited for on the device. How many prompt
    tokens a round takes is PrefillChunks' business.
    """

    max_num_scheduled_tokens: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.connector is None:
            skip_where_there_is_room(self.kv_cache_manager)
        settings = HandoffSettings.of(self.vllm_config)
        time = time_of(self.vllm_config)
        measured = time.slowest if time is not None else None
        if settings.split_rows == "auto":
            self.rounds_policy = EvenRounds(self._stages, None, time)
        else:
            self.rounds_policy = EvenRounds(self._stages, settings.split_rows or None)
        self._pace = pace_of(self.vllm_config)
        self._hosts_were_named = False
        self._share = EngineShare()
        self._engine_was_named = False
        self.chunks: PrefillChunks | None = None
        if settings.prefill_chunks == "auto" and self._stages > 1 and self.scheduler_config.enable_chunked_prefill:
            self.chunks = PrefillChunks(self._stages, self.max_num_scheduled_tokens, self._weight_tokens(measured))
        if self._stages > 1:
            first = self.rounds_policy.spreads_from(self.max_num_active_reqs)
            logger.info(
                "Decoding requests are spread over up to %d rounds, with hosts that keep up from %s on (%s).",
                self._stages,
                "no number" if first is None else f"{first} requests",
                f"the slowest stage takes {1000 * measured.base:.2f} ms, {1e6 * measured.per_row:.1f} us a row and "
                f"{1e6 * measured.per_context:.4f} us a token of its context"
                if measured is not None
                else "no stage time measured",
            )
            logger.info(
                "A round takes up to %d prompt tokens%s.",
                self.max_num_scheduled_tokens,
                f", fewer while fewer than {self.chunks.enough} wait" if self.chunks is not None else "",
            )

    def _weight_tokens(self, measured: StageTime | None) -> float | None:
        """Tokens that a stage computes in the time in which it reads its weights, None if not known."""
        rows = measured.weight_rows if measured is not None else None
        return rows * (1 + self.num_spec_tokens) if rows is not None else None

    def _plan(self, throttle_prefills: bool) -> SchedulerOutput:
        budget, self.max_num_scheduled_tokens = self.max_num_scheduled_tokens, self._round_budget()
        try:
            return self._plan_within_budget(throttle_prefills)
        finally:
            self.max_num_scheduled_tokens = budget

    def _round_budget(self) -> int:
        """Most tokens of the next round."""
        if self.chunks is None:
            return self.max_num_scheduled_tokens
        decodes = waiting = 0
        for request in self.running:
            if request.is_prefill_chunk:
                waiting += request.num_tokens - request.num_computed_tokens
            else:
                decodes += 1 + self.num_spec_tokens
        admissible = max(0, self.max_num_active_reqs - len(self.running))
        for request in itertools.islice(self.waiting, admissible):
            if waiting >= self.chunks.enough:
                break
            waiting += request.num_tokens - request.num_computed_tokens
        return min(self.max_num_scheduled_tokens, decodes + self.chunks.size(waiting))

    def _plan_within_budget(self, throttle_prefills: bool) -> SchedulerOutput:
        self._hold_back()
        output = super()._plan(throttle_prefills)
        if not output.total_num_scheduled_tokens and not self._workers_must_see(output) and self._release_held_back():
            self._keep_rest(output)
            self._hold_back()
            output = super()._plan(throttle_prefills)
        return output

    def _hold_back(self) -> None:
        """Keep out of the next round what the policy wants in a later one, and what cannot take part in it."""
        self._spread()
        for request in [request for request in self.running if request.structured_output_request is not None]:
            if self._awaits_grammar(request):
                # schedule() counts before it looks.
                request.next_decode_eligible_step = max(request.next_decode_eligible_step, self.current_step + 2)

    def _awaits_grammar(self, request: Request) -> bool:
        """Whether the next round would be too early for the request's grammar.

        To compute its bitmask the grammar has to know every token before. With
        one of them still in flight, the engine collects one round, the oldest,
        and then computes the bitmask, whatever else is in flight.
        """
        if not (request.use_structured_output and request.num_output_placeholders):
            return False
        newer = itertools.islice(self._in_flight.values(), 1, None)
        return any(requests.get(request.request_id) is request for requests in newer)

    def _spread(self) -> None:
        """Prepare the choice of decoding requests that vLLM's schedule is about to make."""
        policy, upcoming = self.rounds_policy, self.current_step + 1  # schedule() counts before it looks
        decoding = [request for request in self.running if not request.is_prefill_chunk]
        # Whose last round is in flight still counts as live: caps that shrank as a cohort came to its end would make
        # the others decode in ever thinner rounds, and wait for many of them.
        live = len(decoding)
        decoding = [request for request in decoding if request.next_decode_eligible_step != _NEVER]
        turn = self.ledger.next_round
        if turn % _LOOK_AT_PACE == 0:
            self._look_at_pace(decoding)
        latest = upcoming + policy.lead(live, turn, self._prefill_is_due())
        ready = [request for request in decoding if request.next_decode_eligible_step <= latest]
        late: list[str] = []
        if len(ready) > policy.cap(live, turn):
            late = policy.hold_back([(r.next_decode_eligible_step, r.request_id) for r in ready], live, turn)
        for request in ready:
            if request.next_decode_eligible_step > upcoming:
                request.next_decode_eligible_step = upcoming
        for req_id in late:
            self.requests[req_id].next_decode_eligible_step = upcoming + 1

    def _look_at_pace(self, decoding: list[Request]) -> None:
        policy, live = self.rounds_policy, len(decoding)
        share = self._share.since_last_asked()
        if share > SETS_THE_PACE and live and not self._engine_was_named:
            self._engine_was_named = True
            logger.info(
                "The engine sets the pace: its thread, which schedules and collects, was at work %d%% of the last %d "
                "rounds, with %d decoding requests. Several engines with fewer requests each would do more. Said once.",
                round(100 * share), _LOOK_AT_PACE, live,
            )  # fmt: skip
        policy.host_seconds = self._pace.seconds() if self._pace is not None else 0.0
        policy.context = sum(request.num_computed_tokens for request in decoding) / max(1, live)
        if self._hosts_were_named or not live or policy.time is None:
            return
        wanted, parts = policy.time.parts(live, policy.context), policy.parts(live)
        if parts < wanted:
            self._hosts_were_named = True
            logger.info(
                "Hosts set the pace: launching a round takes the slowest %.1f ms, so %d decoding requests share %s "
                "where the devices could use %d. Said once.",
                1000 * policy.host_seconds, live, f"{parts} rounds" if parts > 1 else "every round", wanted,
            )  # fmt: skip

    def _prefill_is_due(self) -> bool:
        """Whether the next rounds may carry prefill."""
        admissible = len(self.running) < self.max_num_active_reqs and bool(self.waiting or self.kv_holding_waiting)
        return admissible or any(request.is_prefill_chunk for request in self.running)

    def _release_held_back(self) -> bool:
        """Make the requests that would be eligible soonest eligible now. False if none is held back."""
        held_back = [
            request.next_decode_eligible_step
            for request in self.running
            if self.current_step < request.next_decode_eligible_step < _NEVER and not self._awaits_grammar(request)
        ]
        if not held_back:
            return False
        soonest = min(held_back)
        for request in self.running:
            if request.next_decode_eligible_step == soonest:
                request.next_decode_eligible_step = 0
        return True

    def _sort_out(self, requests: Mapping[str, Request]) -> tuple[set[str], set[str]]:
        chunks, last = super()._sort_out(requests)
        for req_id in chunks:
            # A mark from an earlier life (before a preemption, or an earlier turn of a
            # streaming session) would keep the next chunk out of the running queue's turn.
            requests[req_id].next_decode_eligible_step = 0
        if not self.num_spec_tokens:
            # The rounds in flight yield all tokens that it may have. vLLM's own guard counts one
            # round in flight; deeper pipelines would run rounds whose tokens are sure to be thrown away.
            for req_id in last:
                requests[req_id].next_decode_eligible_step = _NEVER
        return chunks, last


class HandoffSyncScheduler(ManifestMixin, Scheduler):
    """vLLM's synchronous scheduler with manifests: a request is scheduled again once its token was collected."""
