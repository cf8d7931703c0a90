"""Schedulers that write a manifest for every round."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from vllm_handoff.scheduler_ext.drafts import drafts_of
from vllm_handoff.scheduler_ext.ledger import HandoffLedger, ScheduledRow, batch_order
from vllm_handoff.scheduler_ext.manifest import attach, manifest_of
from vllm_handoff.scheduler_ext.policy import EvenRounds, StageTime
from vllm_handoff.scheduler_ext.prefill_chunks import PrefillChunks
from vllm_handoff.scheduler_ext.settings import HandoffSettings
from vllm_handoff.scheduler_ext.stage_time import pace_of, time_of

logger = init_logger(__name__)

if TYPE_CHECKING:
    _Base: Any = Scheduler
else:
    _Base = object

# Later than any step: a request that must not be scheduled again.
_NEVER = 1 << 60
# Rounds from one look at the hosts' pace and the requests' context to the next.
_LOOK_AT_PACE = 64


class ManifestMixin(_Base):
    """Adds the manifest to a vLLM scheduler, sync or async.

    vLLM schedules; this class says what that means for transfers.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        stages = self.parallel_config.pipeline_parallel_size
        self.ledger = HandoffLedger(stages, width=1 + self.num_spec_tokens)
        self._stages = stages
        # Requests of each round in flight, oldest first: of rounds without tokens too, which wait in the same queue.
        self._in_flight: dict[int, dict[str, Request]] = {}
        # Of requests with a grammar: the newest that were proposed.
        self._drafts: dict[str, list[int]] = {}
        # What rounds that were not dispatched had to tell the workers: it goes out with the next one.
        self._untold_finished: set[str] = set()
        self._untold_preempted: set[str] = set()
        self._untold_mm_hashes: list[str] = []

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = self._plan(throttle_prefills)
        self.ledger.forget(output.finished_req_ids)
        self.ledger.forget(output.preempted_req_ids or ())
        if output.total_num_scheduled_tokens:
            manifest = self.ledger.open_round(self._scheduled_rows(output), output.total_num_scheduled_tokens)
        else:
            idle = self.get_num_unfinished_requests() == 0
            manifest = self.ledger.open_empty_round(drain=idle, dispatch=self._workers_must_see(output))
        # Rounds without tokens count too: the engine collects them in their turn.
        self._in_flight[manifest.round] = {r: self.requests[r] for r in output.num_scheduled_tokens}
        if manifest.dispatch:
            self._tell_rest(output)
        else:
            self._keep_rest(output)
        attach(output, manifest)
        return output

    def _plan(self, throttle_prefills: bool) -> SchedulerOutput:
        """vLLM's schedule of the next round."""
        return super().schedule(throttle_prefills)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        manifest = manifest_of(scheduler_output)
        assert manifest is not None
        # vLLM finds a row's request by id alone. A request that was aborted in
        # flight and whose id is in use again would get the old one's token.
        drafts = drafts_of(model_runner_output)
        for req_id, request in self._in_flight.pop(manifest.round).items():
            current = self.requests.get(req_id)
            if current is not None and current is not request:
                del scheduler_output.num_scheduled_tokens[req_id]
            elif current is not None and current.use_structured_output and req_id in drafts:
                self._drafts[req_id] = drafts[req_id]
        return super().update_from_output(scheduler_output, model_runner_output)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> Any:
        if self._drafts and scheduler_output.has_structured_output_requests:
            # Whose grammar is asked has no round in flight before this one: its newest drafts are those it will verify.
            for req_id in [req_id for req_id in self._drafts if req_id not in self.requests]:
                del self._drafts[req_id]
            newest = DraftTokenIds(list(self._drafts), [list(drafts) for drafts in self._drafts.values()])
            self.update_draft_token_ids_in_output(newest, scheduler_output)
        return super().get_grammar_bitmask(scheduler_output)

    def _scheduled_rows(self, output: SchedulerOutput) -> Sequence[ScheduledRow]:
        admitted = {new.req_id for new in output.scheduled_new_reqs}
        order = batch_order(output.num_scheduled_tokens, output.scheduled_spec_decode_tokens, 1 + self.num_spec_tokens)
        rows = []
        for req_id in order:
            request = self.requests[req_id]
            samples = not request.is_prefill_chunk
            feeds = samples and not self._surely_last(request)
            rows.append(ScheduledRow(req_id, req_id in admitted, samples, feeds))
        return rows

    def _surely_last(self, request: Request) -> bool:
        """Whether the sample of the round just planned reaches the request's length cap for certain.

        Every round in flight yields at least one token, so tokens known plus
        rounds in flight is a lower bound of the length. With drafts a round
        may yield more, never fewer.
        """
        in_flight = max(1, request.num_output_placeholders)
        if self.num_spec_tokens:
            in_flight = 1
        return request.num_tokens + in_flight >= min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)

    def _workers_must_see(self, output: SchedulerOutput) -> bool:
        """Whether a round without tokens carries work for the workers beyond bookkeeping that can wait."""
        return bool(
            self.connector is not None
            or self.ec_connector is not None
            or self.aux_output_connector is not None
            or output.kv_cache_block_copies
            or output.new_block_ids_to_zero
            or output.scheduled_encoder_inputs
        )

    def _keep_rest(self, output: SchedulerOutput) -> None:
        self._untold_finished |= output.finished_req_ids
        self._untold_preempted |= output.preempted_req_ids or set()
        self._untold_mm_hashes += output.free_encoder_mm_hashes

    def _tell_rest(self, output: SchedulerOutput) -> None:
        if self._untold_finished:
            output.finished_req_ids = output.finished_req_ids | self._untold_finished
            self._untold_finished = set()
        if self._untold_preempted:
            output.preempted_req_ids = (output.preempted_req_ids or set()) | self._untold_preempted
            self._untold_preempted = set()
        if self._untold_mm_hashes:
            output.free_encoder_mm_hashes = self._untold_mm_hashes + output.free_encoder_mm_hashes
            self._untold_mm_hashes = []


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
        settings = HandoffSettings.of(self.vllm_config)
        time = time_of(self.vllm_config)
        measured = time.slowest if time is not None else None
        if settings.split_rows == "auto":
            self.rounds_policy = EvenRounds(self._stages, None, time)
        else:
            self.rounds_policy = EvenRounds(self._stages, settings.split_rows or None)
        self._pace = pace_of(self.vllm_config)
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
        for request in self.running:
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
            policy.host_seconds = self._pace.seconds() if self._pace is not None else 0.0
            policy.context = sum(request.num_computed_tokens for request in decoding) / max(1, len(decoding))
        latest = upcoming + policy.lead(live, turn, self._prefill_is_due())
        ready = [request for request in decoding if request.next_decode_eligible_step <= latest]
        late = policy.hold_back([(r.next_decode_eligible_step, r.request_id) for r in ready], live, turn)
        for request in ready:
            request.next_decode_eligible_step = min(request.next_decode_eligible_step, upcoming)
        for req_id in late:
            self.requests[req_id].next_decode_eligible_step = upcoming + 1

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

    def _budget_in_flight(self, request: Request) -> bool:
        """Whether the rounds in flight already yield all tokens that the request may have."""
        if self.num_spec_tokens:
            return False
        limit = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        return request.num_tokens + request.num_output_placeholders >= limit

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        super()._update_after_schedule(scheduler_output)
        # vLLM's own guard counts one round in flight; deeper pipelines would
        # run rounds whose tokens are sure to be thrown away.
        for req_id in scheduler_output.num_scheduled_tokens:
            request = self.requests[req_id]
            if request.is_prefill_chunk:
                # A mark from an earlier life (before a preemption, or an earlier turn of a
                # streaming session) would keep the next chunk out of the running queue's turn.
                request.next_decode_eligible_step = 0
            elif self._budget_in_flight(request):
                request.next_decode_eligible_step = _NEVER


class HandoffSyncScheduler(ManifestMixin, Scheduler):
    """vLLM's synchronous scheduler with manifests: a request is scheduled again once its token was collected."""
