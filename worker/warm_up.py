"""Manifests for rounds that no scheduler made.

vLLM warms a worker up with hand-built rounds, the same on every rank, inside
each worker. Every rank derives their manifests by the rule below from the same
inputs, with the scheduler's own ledger, so they agree.
"""

from __future__ import annotations

from typing import Any

from vllm_handoff.scheduler_ext.ledger import HandoffLedger, batch_order
from vllm_handoff.scheduler_ext.manifest import Manifest


class WarmUpManifests:
    """Writes a manifest for each warm-up round.

    A row samples once its prompt is complete, and every sample feeds.
    """

    def __init__(self, stages: int, width: int) -> None:
        self._ledger = HandoffLedger(stages, width)
        self._decode_query_len = width
        self._prefill_len: dict[str, int] = {}

    def manifest(self, scheduler_output: Any) -> Manifest:
        """The manifest of a SchedulerOutput that came without one."""
        self._ledger.forget(scheduler_output.finished_req_ids)
        if not scheduler_output.total_num_scheduled_tokens:
            return self._ledger.open_empty_round(drain=True, dispatch=True)
        computed = dict(
            zip(
                scheduler_output.scheduled_cached_reqs.req_ids,
                scheduler_output.scheduled_cached_reqs.num_computed_tokens,
                strict=True,
            )
        )
        for new in scheduler_output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self._prefill_len[new.req_id] = len(new.prefill_token_ids)
        scheduled = scheduler_output.num_scheduled_tokens
        return self._ledger.open_round(
            batch_order(scheduled, scheduler_output.scheduled_spec_decode_tokens, self._decode_query_len),
            scheduler_output.total_num_scheduled_tokens,
            admitted=[new.req_id for new in scheduler_output.scheduled_new_reqs],
            chunks={req_id for req_id in scheduled if computed[req_id] + scheduled[req_id] < self._prefill_len[req_id]},
        )
