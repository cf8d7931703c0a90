"""What every scheduler of ours does beside scheduling: it writes a manifest for every round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from vllm_handoff.scheduler_ext.drafts import drafts_of
from vllm_handoff.scheduler_ext.ledger import HandoffLedger, batch_order
from vllm_handoff.scheduler_ext.manifest import attach, manifest_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

    _Base: Any = Scheduler
else:
    _Base = object


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
        requests = {req_id: self.requests[req_id] for req_id in output.num_scheduled_tokens}
        if output.total_num_scheduled_tokens:
            chunks, last = self._sort_out(requests)
            manifest = self.ledger.open_round(
                batch_order(output.num_scheduled_tokens, output.scheduled_spec_decode_tokens, 1 + self.num_spec_tokens),
                output.total_num_scheduled_tokens,
                admitted=[new.req_id for new in output.scheduled_new_reqs],
                chunks=chunks,
                last=last,
            )
        else:
            idle = self.get_num_unfinished_requests() == 0
            manifest = self.ledger.open_empty_round(drain=idle, dispatch=self._workers_must_see(output))
        # Rounds without tokens count too: the engine collects them in their turn.
        self._in_flight[manifest.round] = requests
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
        current, planned = self.requests, self._in_flight.pop(manifest.round)
        for req_id, request in planned.items():
            if current.get(req_id, request) is not request:
                del scheduler_output.num_scheduled_tokens[req_id]
        for req_id, drafts in drafts_of(model_runner_output).items():
            request = planned.get(req_id)
            if request is not None and current.get(req_id) is request and request.use_structured_output:
                self._drafts[req_id] = drafts
        return super().update_from_output(scheduler_output, model_runner_output)

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> Any:
        if self._drafts and scheduler_output.has_structured_output_requests:
            # Whose grammar is asked has no round in flight before this one: its newest drafts are those it will verify.
            for req_id in [req_id for req_id in self._drafts if req_id not in self.requests]:
                del self._drafts[req_id]
            newest = DraftTokenIds(list(self._drafts), [list(drafts) for drafts in self._drafts.values()])
            self.update_draft_token_ids_in_output(newest, scheduler_output)
        return super().get_grammar_bitmask(scheduler_output)

    def _sort_out(self, requests: Mapping[str, Request]) -> tuple[set[str], set[str]]:
        """Of the round just planned: whose chunk of a prompt is not the last, and who surely samples the last token.

        Every round in flight yields at least one token, so tokens known plus
        rounds in flight is a lower bound of the length. With drafts a round
        may yield more, never fewer.
        """
        chunks, last = set(), set()
        longest, drafts = self.max_model_len, self.num_spec_tokens
        for req_id, request in requests.items():
            if request.is_prefill_chunk:
                chunks.add(req_id)
                continue
            length = request.num_tokens + (1 if drafts else request.num_output_placeholders or 1)
            if length >= longest or length >= request.num_prompt_tokens + request.max_tokens:
                last.add(req_id)
        return chunks, last

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
