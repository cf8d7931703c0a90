"""The links of one rank: to the stages beside it (hop) and between last stage and first (handoff)."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from vllm.distributed.parallel_state import get_pp_group
from vllm.logger import init_logger

from vllm_handoff.scheduler_ext.manifest import Manifest
from vllm_handoff.scheduler_ext.settings import HandoffSettings
from vllm_handoff.worker.handoff import HandoffReceiver, HandoffSender
from vllm_handoff.worker.hop import HopLayout, HopReceiver, HopSender
from vllm_handoff.worker.recorder import Mark, Recorder
from vllm_handoff.worker.transfer import Handle, Link, Peer, warm_up

logger = init_logger(__name__)


class StageLinks:
    """Makes this rank's channels and puts them where vLLM's worker and model runner look for theirs.

    Every rank of the world makes one, in the same order: making a process
    group is collective.
    """

    def __init__(self, vllm_config: Any, runner: Any, device: torch.device, recorder: Recorder) -> None:
        pp = get_pp_group()
        self._stage = stage = pp.rank_in_group
        stages = pp.world_size
        self._manifest: Manifest | None = None
        self._recorder = recorder
        self._handler = runner.pp_handler

        # Only the first stage embeds tokens; those between never look at them. How many drafts of a
        # request were rejected, and so where its next token stands, every stage must know.
        receivers = tuple(range(stages - 1)) if vllm_config.num_speculative_tokens else (0,)
        hops = [(s, s + 1) for s in range(stages - 1)]
        handoffs = [(stages - 1, s) for s in receivers]
        links = _connect(pp, hops, handoffs, device, vllm_config)

        if pp.is_last_rank:
            self._handler.sender = HandoffSender([links["handoff", stage, s] for s in receivers], device)
        elif stage in receivers:
            link = links["handoff", stages - 1, stage]
            self._handler.receiver = HandoffReceiver(link, device, stage, runner.max_num_reqs)

        max_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        layouts = _layouts(pp, runner, vllm_config, device)
        self._hop_sender: HopSender | None = None
        self._hop_receiver: HopReceiver | None = None
        if not pp.is_last_rank:
            depth = HandoffSettings.of(vllm_config).rounds_in_flight(stages)
            self._hop_sender = HopSender(
                links["hop", stage, stage + 1], layouts[stage + 1], max_tokens, device, buffers=stages,
                few_tokens=runner.max_num_reqs * runner.decode_query_len, small_buffers=depth,
            )  # fmt: skip
        if not pp.is_first_rank:
            self._hop_receiver = HopReceiver(links["hop", stage - 1, stage], layouts[stage], max_tokens, device)
        self._take_over(pp)
        logger.info(
            "Stage %d of %d: hop rows of %d x %s, handoff received by stages %s, links by %s",
            stage, stages, layouts[max(1, stage)].width, str(layouts[-1].dtype).removeprefix("torch."), list(receivers),
            next(iter(links.values())).description if links else "nothing",
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


def _layouts(pp: Any, runner: Any, vllm_config: Any, device: torch.device) -> list[HopLayout]:
    """What each stage receives. Collective, at start.

    Each stage says it of itself: with EAGLE3 a stage also receives the states
    that the proposer reads of the layers before, so no two are alike.
    """
    dtype = vllm_config.model_config.dtype
    example = runner.model.make_empty_intermediate_tensors(batch_size=1, dtype=dtype, device=device)
    mine = HopLayout.of(example.tensors)
    layouts: list[HopLayout] = [mine] * pp.world_size
    dist.all_gather_object(layouts, mine, group=pp.cpu_group)
    return layouts


def _connect(
    pp: Any, hops: list[tuple[int, int]], handoffs: list[tuple[int, int]], device: torch.device, vllm_config: Any
) -> dict[tuple[str, int, int], Link]:
    """This rank's links by (name, sender, receiver); pairs are (sender, receiver) stages. Collective."""
    if device.type == "cuda" and torch.version.cuda is not None:
        from vllm_handoff.worker import nccl_peer

        meet = HandoffSettings.of(vllm_config).rendezvous
        return nccl_peer.connect({"hop": hops, "handoff": handoffs}, pp.cpu_group, device, meet)
    links: dict[tuple[str, int, int], Link] = {}
    # Two groups, so that a handoff never queues behind a hop.
    name: Literal["hop", "handoff"]
    for name, pairs in (("hop", hops), ("handoff", handoffs)):
        group = pp.make_sibling_device_group(f"handoff_{name}")
        warm_up(group, [(pp.ranks[sender], pp.ranks[receiver]) for sender, receiver in pairs], device)
        for sender, receiver in pairs:
            if pp.rank_in_group in (sender, receiver):
                other = receiver if pp.rank_in_group == sender else sender
                links[name, sender, receiver] = Peer(group, pp.ranks[other], other, name)
    return links


class _Marked:
    """A posted hop whose wait is seen by the recorder."""

    def __init__(self, pending: Handle, recorder: Recorder) -> None:
        self._pending = pending
        self._recorder = recorder

    def wait(self) -> None:
        self._recorder.mark(Mark.HOP_WAIT)
        self._pending.wait()
        self._recorder.mark(Mark.HOP)
