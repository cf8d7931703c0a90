"""The model runner: vLLM's V2 runner, with manifests instead of locally derived transfers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.worker.gpu import model_runner as v2
from vllm.v1.worker.gpu.pp_utils import PPHandler
from vllm.v1.worker.gpu.sample.sampler import Sampler

from vllm_handoff.scheduler_ext.manifest import Manifest
from vllm_handoff.worker.draft_model import fit_for_last_stage
from vllm_handoff.worker.draft_output import OutputWithDrafts
from vllm_handoff.worker.greedy_sampler import GreedySampler, greedy_sampler
from vllm_handoff.worker.handoff import HandoffReceiver, HandoffSender
from vllm_handoff.worker.recorder import Mark, Recorder

if TYPE_CHECKING:
    _Base: Any = v2.GPUModelRunner
else:
    _Base = object


class ManifestHandler(PPHandler):
    """Stands where vLLM's PPHandler stands in the V2 runner, and does what the manifest says.

    vLLM's handler derives on every rank whether a transfer takes place, and
    applies it a fixed number of calls later. This one is told.
    """

    def __init__(self, max_num_reqs: int, num_speculative_steps: int, device: torch.device) -> None:
        # Not super().__init__(): it makes a communicator, a stream and a queue that nothing here uses.
        self.num_speculative_steps = num_speculative_steps
        self.device = device
        self.aux_hidden_state_relay_keys = ()
        self.req_idx_gen_np = np.zeros(0, dtype=np.int32)
        self.manifest: Manifest | None = None
        # With speculative decoding, what was sampled waits for the drafts that are proposed after it.
        self._sampled: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.sender: HandoffSender | None = None
        self.receiver: HandoffReceiver | None = None

    def on_req_idx_freed(self, req_idx: int) -> None:
        """Called when a request leaves its slot."""
        if self.receiver is not None:
            self.receiver.forget(req_idx)

    def get_prev_sampled_outputs(self, draft_tokens_to_update: torch.Tensor | None = None) -> None:
        raise AssertionError("handoffs are applied by ManifestRunnerMixin.update_pp_decode_requests")

    def receive(self, input_batch: Any) -> bool:
        """Called by a stage that does not sample, after its forward. True if every row's sample is wanted."""
        manifest = self._checked(input_batch)
        if not manifest.handoff:
            return False
        if self.receiver is not None:
            self.receiver.announce(manifest, input_batch.idx_mapping_np)
        return not manifest.rows.unread

    def broadcast(
        self, sampled_token_ids: torch.Tensor, num_sampled: torch.Tensor, num_rejected: torch.Tensor, input_batch: Any
    ) -> None:
        """Called by the last stage once the round is sampled."""
        manifest = self._checked(input_batch)
        if manifest.handoff:
            assert self.sender is not None
            if manifest.width > 1:
                self._sampled = sampled_token_ids, num_sampled, num_rejected
            else:
                self.sender.send(manifest, sampled_token_ids, num_sampled, num_rejected)

    def broadcast_drafts(self, draft_tokens: torch.Tensor, input_batch: Any) -> None:
        """Called by the last stage once the drafts for the next round are there, by request slot [slots, drafts].

        Tokens and drafts travel together: whoever needs the one needs the other.
        """
        manifest = self._checked(input_batch)
        if manifest.handoff:
            assert self.sender is not None and self._sampled is not None, f"round {manifest.round}: nothing was sampled"
            sampled, self._sampled = self._sampled, None
            self.sender.send(manifest, *sampled, draft_tokens[input_batch.idx_mapping])

    def _checked(self, input_batch: Any) -> Manifest:
        manifest = self.manifest
        assert manifest is not None
        if manifest.handoff:
            ours, theirs = tuple(input_batch.req_ids), manifest.rows.req_ids
            assert ours == theirs, f"round {manifest.round}: this stage's batch is {ours}, the manifest's {theirs}"
        return manifest


@contextlib.contextmanager
def _manifest_handler() -> Iterator[None]:
    """While a runner is made, its module's PPHandler is ours.

    Why a patch: the V2 runner of vLLM 0.32 names the class it makes, and has no
    hook for it. Can go once it asks a method.
    """
    before, v2.PPHandler = v2.PPHandler, ManifestHandler  # type: ignore[misc]
    try:
        yield
    finally:
        v2.PPHandler = before  # type: ignore[misc]


class ManifestRunnerMixin(_Base):
    """The hooks of the V2 runner that a manifest takes over. Mixed into the GPU's and the CPU's runner alike."""

    pp_handler: ManifestHandler | None
    recorder: Recorder

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        with _manifest_handler():
            super().__init__(vllm_config, device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        if self.pp_handler is not None and self.speculator is not None:
            fit_for_last_stage(self.speculator, self.speculative_config.method)
        with greedy_sampler():
            super().load_model(*args, **kwargs)

    def end_warm_up(self) -> None:
        """From here on every round is a scheduler's."""
        if isinstance(self.sampler, GreedySampler):
            self.sampler.shortens = True

    def begin_round(self, manifest: Manifest) -> None:
        """Set the manifest that the round about to run obeys."""
        if self.pp_handler is not None:
            self.pp_handler.manifest = manifest

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        handler = self.draft_tokens_handler
        if output is None or self.pp_handler is None or self.speculator is None or handler.draft_tokens_np is None:
            return output
        # One of its own: the handler's is recorded again in the next round, perhaps before this is waited for.
        arrived = torch.cuda.Event(blocking=True)
        arrived.record(handler.copy_stream)
        return OutputWithDrafts(output, handler.req_ids, handler.draft_tokens_np, arrived)

    def update_pp_decode_requests(self) -> None:
        """Apply the handoffs that this round needs. vLLM calls it first in every round."""
        if self.pp_handler is None or self.pp_handler.receiver is None:
            return
        assert self.pp_handler.manifest is not None
        for sampled, drafts in self.pp_handler.receiver.take(self.pp_handler.manifest.needs):
            self.postprocess_sampled(**sampled._asdict())
            if drafts is not None:
                self.req_states.draft_tokens[drafts.slots] = drafts.tokens
        self.recorder.mark(Mark.HANDOFF)

    def add_requests(self, scheduler_output: Any) -> None:
        if not scheduler_output.scheduled_new_reqs and _stages_only_what_is_added(self.sampler):
            # vLLM 0.32 brings all of the sampler's per-request options to the device in every
            # round, a dozen copies, although they change only when a request is added.
            return
        super().add_requests(scheduler_output)
        if self.pp_handler is not None and self.pp_handler.receiver is not None:
            assert self.pp_handler.manifest is not None
            index_of = self.req_states.req_id_to_index
            slots = [index_of[new.req_id] for new in scheduler_output.scheduled_new_reqs]
            self.pp_handler.receiver.admit(slots, self.pp_handler.manifest.round)


def _stages_only_what_is_added(sampler: Sampler | None) -> bool:
    """Whether the sampler has nothing to bring to the device in a round that adds no request.

    True of vLLM's own. A user's logits processor is promised a call of its
    `apply_staged_writes` in every step, and may count on it.
    """
    if sampler is None:
        return True
    return type(sampler) in (Sampler, GreedySampler) and all(
        type(processor).__module__.startswith("vllm.") for processor in sampler.logits_processors
    )


class HandoffModelRunner(ManifestRunnerMixin, v2.GPUModelRunner):
    """The V2 runner on a GPU."""
