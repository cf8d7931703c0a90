"""The two stages of the simulated pipeline: they keep books instead of computing, and use the real channels."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from vllm_handoff.scheduler_ext.ledger import batch_order
from vllm_handoff.scheduler_ext.manifest import Manifest
from vllm_handoff.worker.handoff import Drafts, HandoffReceiver, HandoffSender, Sampled
from vllm_handoff.worker.hop import HopReceiver, HopSender

if TYPE_CHECKING:
    from simulated import SimulatedPipeline

CPU = torch.device("cpu")


class Deadlock(AssertionError):
    """A stage waits for a transfer that its peer will never start."""


@dataclass
class Link:
    """One direction between two stages: what was sent, what was received, and who can produce more."""

    sent: deque[torch.Tensor] = field(default_factory=deque)
    operations: dict[str, list[tuple]] = field(default_factory=lambda: {"send": [], "receive": []})
    produce: Any = None  # runs the sending stage until it has sent something, or gives up


class RecordingPeer:
    """Stands for worker.transfer.Peer: same calls, over a Link in memory."""

    def __init__(self, link: Link) -> None:
        self.link = link

    def send(self, tensor: torch.Tensor, what: str) -> Any:
        self.link.operations["send"].append((what, tuple(tensor.shape), tensor.dtype))
        self.link.sent.append(tensor.clone())
        return _Done()

    def post_receive(self, tensor: torch.Tensor, what: str) -> Any:
        self.link.operations["receive"].append((what, tuple(tensor.shape), tensor.dtype))
        return _Arrival(self.link, tensor, what)


class _Done:
    def wait(self) -> None:
        pass


class _Arrival:
    def __init__(self, link: Link, tensor: torch.Tensor, what: str) -> None:
        self._link, self._tensor, self._what = link, tensor, what

    def wait(self) -> None:
        if not self._link.sent and self._link.produce is not None:
            self._link.produce()
        if not self._link.sent:
            raise Deadlock(self._what)
        self._tensor.copy_(self._link.sent.popleft())


def token(uid: int, index: int) -> int:
    """The token at position `index` of request number `uid`: no two places share one by accident."""
    return 1000 + uid * 10_000 + index


def proposal(uid: int, known: int, drafts: int) -> list[int]:
    """What is proposed for the places behind `known` tokens: right up to a place that depends on both, then wrong."""
    right = (7 * uid + 3 * known) % (drafts + 1)
    return [token(uid, known + i) if i < right else -1 - i for i in range(drafts)]


@dataclass
class Slot:
    """What a stage's device knows of a request."""

    uid: int
    prefill_len: int
    computed: int
    known: int  # tokens
    newest: int
    drafts: list[int]


class Stage:
    """What both stages do alike: know their requests, and work out a round's input tokens."""

    def __init__(self, pipeline: SimulatedPipeline) -> None:
        self.pipeline = pipeline
        self.drafts = pipeline.scheduler.num_spec_tokens
        self.known: dict[str, Slot] = {}

    def admit(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            tokens = new.prefill_token_ids
            uid = (tokens[0] - 1000) // 10_000
            self.known[new.req_id] = Slot(
                uid, len(tokens), new.num_computed_tokens, len(tokens), tokens[-1], [0] * self.drafts
            )

    def batch(self, output: Any) -> list[str]:
        return batch_order(output.num_scheduled_tokens, output.scheduled_spec_decode_tokens, 1 + self.drafts)

    def inputs(self, output: Any, host_computed: dict[str, int]) -> list[int]:
        """Input tokens of a round, request by request. A draft counts as a token."""
        ids: list[int] = []
        for req_id in self.batch(output):
            slot, count = self.known[req_id], output.num_scheduled_tokens[req_id]
            assert slot.computed <= host_computed[req_id], f"{req_id}: the host's count is no upper bound"
            if slot.computed < slot.prefill_len:
                ids += [token(slot.uid, slot.computed + i) for i in range(count)]
                continue
            assert slot.computed == slot.known - 1, f"{req_id} has lost count: {slot}"
            assert slot.newest == token(slot.uid, slot.computed), f"{req_id} decodes from {slot.newest}"
            assert len(output.scheduled_spec_decode_tokens.get(req_id, ())) == count - 1
            ids += [slot.newest, *slot.drafts[: count - 1]]
        return ids


class FirstStage(Stage):
    """Keeps what is handed to it per request slot; decodes must find the right tokens there."""

    def __init__(self, pipeline: SimulatedPipeline) -> None:
        super().__init__(pipeline)
        self.slots: dict[str, int] = {}
        self.free = list(range(pipeline.scheduler.max_num_running_reqs))
        self.receiver = HandoffReceiver(RecordingPeer(pipeline.handoffs), CPU, 0, len(self.free))
        self.hop = HopSender(RecordingPeer(pipeline.hops), pipeline.layout, 64, CPU, buffers=2)

    def run(self, output: Any, manifest: Manifest) -> None:
        for sampled, drafts in self.receiver.take(manifest.needs):
            self._apply(sampled, drafts)
        for req_id in sorted(output.finished_req_ids | (output.preempted_req_ids or set())):
            self._remove(req_id)
        for new in output.scheduled_new_reqs:
            self._remove(new.req_id)
            self.slots[new.req_id] = self.free.pop()
        self.admit(output)
        self.receiver.admit([self.slots[new.req_id] for new in output.scheduled_new_reqs], manifest.round)
        if not manifest.num_tokens:
            return
        ids = torch.tensor(self.inputs(output, self.pipeline.computed(output)), dtype=torch.float32)
        self.hop.send(manifest.round, {"hidden": ids.unsqueeze(1).expand(-1, 4)}, manifest.num_tokens)
        for req_id, count in output.num_scheduled_tokens.items():
            self.known[req_id].computed += count
        if manifest.handoff:
            self.receiver.announce(manifest, np.array([self.slots[req_id] for req_id in manifest.rows.req_ids]))

    def _apply(self, sampled: Sampled, drafts: Drafts | None) -> None:
        by_slot = {slot: self.known[req_id] for req_id, slot in self.slots.items()}
        columns = (sampled.idx_mapping, sampled.sampled_tokens, sampled.num_sampled, sampled.num_rejected)
        for number, values, count, rejected in zip(*(column.tolist() for column in columns), strict=True):
            if number >= 0:
                slot = by_slot[number]
                slot.known += count
                slot.computed -= rejected
                slot.newest = values[count - 1] if count else slot.newest
        if self.drafts:
            assert drafts is not None
            for number, tokens in zip(drafts.slots.tolist(), drafts.tokens.tolist(), strict=True):
                by_slot[number].drafts = tokens

    def _remove(self, req_id: str) -> None:
        if req_id in self.slots:
            slot = self.slots.pop(req_id)
            self.receiver.forget(slot)
            self.free.append(slot)


class LastStage(Stage):
    """Samples from the known function; runs its rounds in order, as late as possible."""

    def __init__(self, pipeline: SimulatedPipeline) -> None:
        super().__init__(pipeline)
        self.queue: deque[tuple[Any, Manifest, dict[str, int]]] = deque()
        self.outputs: dict[int, ModelRunnerOutput] = {}
        self.sender = HandoffSender([RecordingPeer(pipeline.handoffs)], CPU)
        self.hop = HopReceiver(RecordingPeer(pipeline.hops), pipeline.layout, 64, CPU)

    def run_until(self, number: int) -> None:
        while self.queue and self.queue[0][1].round <= number:
            self._run_one()

    def run_until_sent(self) -> None:
        before = len(self.pipeline.handoffs.sent)
        while self.queue and len(self.pipeline.handoffs.sent) == before:
            self._run_one()

    def _run_one(self) -> None:
        output, manifest, computed = self.queue.popleft()
        self.admit(output)
        if not manifest.num_tokens:
            self.outputs[manifest.round] = EMPTY_MODEL_RUNNER_OUTPUT
            return
        tensors, pending = self.hop.post(manifest.round, manifest.num_tokens)
        pending.wait()
        embedded = tensors["hidden"][: manifest.num_tokens, 0].long().tolist()
        assert embedded == self.inputs(output, computed), f"round {manifest.round}: the first stage embeds other tokens"
        batch = self.batch(output)
        sampled = [self._sample(req_id, output.num_scheduled_tokens[req_id]) for req_id in batch]
        if manifest.handoff:
            self._hand_off(manifest, sampled)
        self.outputs[manifest.round] = ModelRunnerOutput(
            req_ids=batch,
            req_id_to_index={req_id: i for i, req_id in enumerate(batch)},
            sampled_token_ids=[tokens for tokens, _ in sampled],
        )

    def _sample(self, req_id: str, count: int) -> tuple[list[int], int]:
        """The tokens that a request gets, and how many drafts are rejected."""
        slot = self.known[req_id]
        slot.computed += count
        if slot.computed < slot.prefill_len:
            return [], 0
        rejected = 0
        if slot.computed > slot.known:  # drafts were among them
            drafts = slot.drafts[: count - 1]
            right = [draft == token(slot.uid, slot.known + i) for i, draft in enumerate(drafts)]
            rejected = len(drafts) - (right.index(False) if False in right else len(right))
            slot.computed -= rejected
        tokens = [token(slot.uid, index) for index in range(slot.known, slot.computed + 1)]
        slot.known, slot.newest = slot.computed + 1, tokens[-1]
        slot.drafts = proposal(slot.uid, slot.known, self.drafts)
        return tokens, rejected

    def _hand_off(self, manifest: Manifest, sampled: list[tuple[list[int], int]]) -> None:
        most = max(1, max(len(tokens) for tokens, _ in sampled))
        self.sender.send(
            manifest,
            torch.tensor([[*tokens, *[0] * (most - len(tokens))] for tokens, _ in sampled]),
            torch.tensor([len(tokens) for tokens, _ in sampled]),
            torch.tensor([rejected for _, rejected in sampled]),
            torch.tensor([self.known[req_id].drafts for req_id in manifest.rows.req_ids]) if self.drafts else None,
        )
