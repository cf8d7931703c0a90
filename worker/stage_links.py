"""The links of one rank: to the stages beside it (hop) and between last stage and first (handoff)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_pp_group
from vllm.logger import init_logger

from vllm_handoff.scheduler_ext.manifest import Manifest
from vllm_handoff.worker.handoff import HandoffReceiver, HandoffSender
from vllm_handoff.worker.hop import HopLayout, HopReceiver, HopSender
from vllm_handoff.worker.recorder import Mark, Recorder
from vllm_handoff.worker.transfer import Peer, PendingReceive, warm_up

logger = init_logger(__name__)


class StageLinks:
    """Makes this rank's channels and puts them where vLLM's worker and model runner look for theirs.

    Every rank of the world makes one, in the same order: making a process
    group is collective.
    """

    def __init__(self, vllm_config: Any, runner: Any, device: torch.device, recorder: Recorder) -> None:
        pp = get_pp_group()
        self._stage = stage = pp.rank_in_group
        stages, ranks = pp.world_size, pp.ranks
        self._manifest: Manifest | None = None
        self._recorder = recorder
        self._handler = runner.pp_handler

        # Two communicators, so that a handoff never queues behind a hop.
        hop_group = pp.make_sibling_device_group("handoff_hop")
        handoff_group = pp.make_sibling_device_group("handoff_tokens")
        # Only the first stage embeds tokens; those between never look at them.
        receivers = (0,)
        warm_up(hop_group, [(ranks[s], ranks[s + 1]) for s in range(stages - 1)], device)
        warm_up(handoff_group, [(ranks[-1], ranks[s]) for s in receivers], device)

        if pp.is_last_rank:
            peers = [Peer(handoff_group, ranks[s], s, "handoff") for s in receivers]
            self._handler.sender = HandoffSender(peers, device)
        elif stage in receivers:
            sender = Peer(handoff_group, ranks[-1], stages - 1, "handoff")
            self._handler.receiver = HandoffReceiver(sender, device, stage, runner.max_num_reqs)

        max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        example = runner.model.make_empty_intermediate_tensors(
            batch_size=1, dtype=vllm_config.model_config.dtype, device=device
        )
        layout = HopLayout.of(example.tensors)
        self._hop_sender: HopSender | None = None
        self._hop_receiver: HopReceiver | None = None
        if not pp.is_last_rank:
            peer = Peer(hop_group, ranks[stage + 1], stage + 1)
            self._hop_sender = HopSender(peer, layout, max_tokens, device, buffers=stages)
        if not pp.is_first_rank:
            peer = Peer(hop_group, ranks[stage - 1], stage - 1)
            self._hop_receiver = HopReceiver(peer, layout, max_tokens, device)
        self._take_over(pp)
        logger.info(
            "Stage %d of %d: hop rows of %d x %s over %s, handoff received by stages %s",
            stage, stages, layout.width, str(layout.dtype).removeprefix("torch."),
            dist.get_backend(hop_group), list(receivers),
        )  # fmt: skip

    def begin_round(self, manifest: Manifest) -> None:
        """Set the manifest that the transfers of the round about to run obey."""
        self._manifest = manifest

    def drain(self) -> None:
        """Empty the handoff channel, so that the first real round starts from nothing."""
        if self._handler.receiver is not None:
            self._handler.receiver.drain()

    def _take_over(self, pp: Any) -> None:
        """Put the hop in the place of vLLM's tensor-dict transfers, on this rank's pipeline group alone.

        Why: vLLM 0.32's worker sends pickled metadata before the hidden states
        in every round, and its host waits for it. The worker calls these two
        methods of its group and nothing else, so no method of it is copied.
        Can go: when vLLM lets a worker choose its transfer.
        """
        pp.isend_tensor_dict = self._send
        pp.irecv_tensor_dict = self._receive

    def _send(self, tensors: dict[str, torch.Tensor], **_: Any) -> list[Any]:
        manifest, sender = self._manifest, self._hop_sender
        assert manifest is not None and sender is not None
        sender.send(manifest.round, tensors, manifest.num_tokens)
        return []

    def _receive(self, **_: Any) -> tuple[dict[str, torch.Tensor], list[Any], list[Any]]:
        manifest, receiver = self._manifest, self._hop_receiver
        assert manifest is not None and receiver is not None
        tensors, pending = receiver.post(manifest.round, manifest.num_tokens)
        return tensors, [_Marked(pending, self._recorder)], []


class _Marked:
    """A posted hop whose wait is seen by the recorder."""

    def __init__(self, pending: PendingReceive, recorder: Recorder) -> None:
        self._pending = pending
        self._recorder = recorder

    def wait(self) -> None:
        self._recorder.mark(Mark.HOP_WAIT)
        self._pending.wait()
        self._recorder.mark(Mark.HOP)
