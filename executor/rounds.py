"""Rounds on the control plane: one message a round, and futures that follow vLLM's two calls for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from vllm_handoff.executor import pickling
from vllm_handoff.executor.control_plane import ControlPlane
from vllm_handoff.executor.messages import ALL_RANKS, NO_ROUND, Round, Sample, Sampling
from vllm_handoff.executor.stats import RoundStats
from vllm_handoff.scheduler_ext import manifest as manifests


class RoundDispatcher:
    """Sends rounds and answers the engine's execute_model and sample_tokens.

    The engine awaits execute_model's future before it calls sample_tokens, so
    that future never depends on a message that sample_tokens would send:

    - a round whose samples no grammar constrains is sent with sampling "now";
      execute_model's future is complete (None: "now call sample_tokens") and
      sample_tokens returns the future of the round without sending anything;
    - with structured output the round is sent as "deferred", so its forward
      runs while the grammar's bitmask is computed; sample_tokens sends that;
    - without tokens, or with `samples=False`, execute_model's future is the round's.

    Args:
        plane: the control plane, started.
        output_rank: the rank whose output is the round's.
        samples: False for a model whose forward is the result (pooling, encoder only).
        empty_output: what a round that is not dispatched gives.
        timeout: seconds for a round's reply.
        publish: given the counts whenever they have changed; called on the fast path.
        depth: rounds that may be in flight, for the counts.
    """

    def __init__(
        self,
        plane: ControlPlane,
        output_rank: int,
        samples: bool,
        empty_output: Any,
        timeout: float | None,
        publish: Callable[[RoundStats], None] = lambda stats: None,
        depth: int = 0,
    ) -> None:
        self._plane = plane
        self._output_rank = output_rank
        self._samples = samples
        self._timeout = timeout
        self._empty = _completed(empty_output)
        self._go_on = _completed(None)
        self._next_round = 0
        self._last_dispatched = NO_ROUND
        # The round that sample_tokens is about to be called for.
        self._unsampled: tuple[int, Sampling, Future] | None = None
        self._publish = publish
        self.stats = RoundStats(depth=depth)
        publish(self.stats)

    def execute_model(self, scheduler_output: Any, aggregate: Callable[[list[Any]], Any] | None = None) -> Future:
        """Send a round to every worker.

        Args:
            scheduler_output: vLLM's SchedulerOutput, with or without a manifest.
            aggregate: if given, all ranks reply and this makes the round's
                output of theirs, in rank order.

        Raises:
            ValueError: the manifest's round does not continue the stream.
            ExecutorFailedError: the executor has failed.
        """
        manifest = manifests.detach(scheduler_output)
        number = self._next_round if manifest is None else manifest.round
        if number != self._next_round:
            raise ValueError(
                f"Round {number} was scheduled where round {self._next_round} was due. Every scheduled round "
                "has to be given to the executor, once and in order."
            )
        self._next_round += 1
        tokens = scheduler_output.total_num_scheduled_tokens
        self.stats.tokens += tokens
        # The engine calls from the thread that schedules and collects.
        self.stats.engine_ns = time.thread_time_ns()
        if manifest is not None and not manifest.dispatch:
            manifests.attach(scheduler_output, manifest)
            self.stats.rounds_not_dispatched += 1
            self._publish(self.stats)
            return self._empty
        sampling: Sampling = "none"
        if tokens and self._samples:
            sampling = "deferred" if scheduler_output.has_structured_output_requests else "now"
        # Pickled once for all workers, and without the manifest, which is a field of the message.
        pieces = pickling.pieces(scheduler_output)
        # Without tokens the reply does not tell that every worker has taken it.
        shared_bytes = self._plane.shared.put(pieces) if tokens else 0
        payload = b"" if shared_bytes else b"".join(pieces)
        if manifest is not None:
            manifests.attach(scheduler_output, manifest)
        reply_rank = self._output_rank if aggregate is None else ALL_RANKS
        follows = self._last_dispatched
        sent_ns = time.monotonic_ns()

        def combine(results: dict[int, Any]) -> Any:
            if shared_bytes:
                # The last stage has sampled what all stages, and all ranks of each, have computed from it.
                self._plane.shared.release()
            self.stats.answered(sent_ns, time.monotonic_ns())
            self._publish(self.stats)
            if aggregate is not None:
                return aggregate([results[rank] for rank in sorted(results)])
            return results[self._output_rank]

        future = self._plane.send(
            lambda seq: Round(
                seq, number, follows, sampling, len(payload), reply_rank, manifest, sent_ns, shared_bytes
            ),
            payload,
            label=f"round {number}",
            reply_rank=reply_rank,
            combine=combine,
            timeout=self._timeout,
            round_number=number,
        )
        self._last_dispatched = number
        self._count(tokens, manifest, sent_ns)
        if sampling == "none":
            return future
        self._unsampled = (number, sampling, future)
        return self._go_on

    def sample_tokens(self, grammar_output: Any) -> Future:
        """The future of the round that execute_model was called for last.

        Raises:
            RuntimeError: no round waits to be sampled.
        """
        if self._unsampled is None:
            raise RuntimeError("sample_tokens was called and no round waits to be sampled; call execute_model first.")
        number, sampling, future = self._unsampled
        self._unsampled = None
        if sampling == "deferred":
            payload = pickling.dumps(grammar_output)
            self._plane.send_unanswered(lambda seq: Sample(seq, number, len(payload)), payload, label=f"round {number}")
        elif grammar_output is not None:
            raise RuntimeError(
                f"Round {number}: a grammar came for a round that was scheduled without structured output requests."
            )
        return future

    def note_fault(self) -> None:
        """The executor has failed."""
        self.stats.faults += 1
        self._publish(self.stats)

    def _count(self, tokens: int, manifest: manifests.Manifest | None, sent_ns: int) -> None:
        self.stats.sent(sent_ns)
        if manifest is not None and manifest.handoff:
            self.stats.handoffs += 1
            self.stats.handoff_bytes += manifest.payload_bytes
        elif tokens:
            self.stats.handoffs_not_needed += 1
        self._publish(self.stats)


def _completed(result: Any) -> Future:
    future: Future = Future()
    future.set_result(result)
    return future
