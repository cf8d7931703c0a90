"""A pipeline without processes: the real scheduler and the real channels, stages that only keep books.

Every stage issues its transfers through the project's own channel objects,
over a peer that records each operation. The last stage runs as late as it can:
only when the first stage waits for a handoff, or when the engine collects an
output. A wait that could never end is therefore seen at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, SpeculativeConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from simulated_stages import FirstStage, LastStage, Link, token
from vllm_handoff.executor import patches
from vllm_handoff.scheduler_ext.manifest import Manifest, manifest_of
from vllm_handoff.scheduler_ext.policy import StagePoint
from vllm_handoff.scheduler_ext.scheduler import HandoffScheduler, HandoffSyncScheduler
from vllm_handoff.scheduler_ext.stage_time import Pace, keep_pace, keep_stage_times
from vllm_handoff.worker.hop import HopLayout

BLOCK = 16


@cache
def _configuration(
    model: Path, max_seqs: int, max_tokens: int, stages: int, asynchronous: bool, drafts: int, prefix_cache: bool
) -> VllmConfig:
    patches.apply()
    model_config = ModelConfig(model=str(model), dtype="float32", seed=0)
    speculative = SpeculativeConfig(
        method="ngram", num_speculative_tokens=drafts, prompt_lookup_max=2, prompt_lookup_min=1,
        target_model_config=model_config, target_parallel_config=ParallelConfig(),
    ) if drafts else None  # fmt: skip
    config = VllmConfig(
        model_config=model_config,
        speculative_config=speculative,
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_seqs, max_num_batched_tokens=max_tokens, max_model_len=512,
            enable_chunked_prefill=True, is_encoder_decoder=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=prefix_cache),
        parallel_config=ParallelConfig(pipeline_parallel_size=stages, distributed_executor_backend="mp"),
    )  # fmt: skip
    config.parallel_config.distributed_executor_backend = "vllm_handoff.executor.HandoffExecutor"
    config.scheduler_config.async_scheduling = asynchronous
    return config


def make_scheduler(
    model: Path,
    *,
    blocks: int,
    max_seqs: int = 8,
    max_tokens: int = 64,
    stages: int = 2,
    asynchronous: bool = True,
    split_rows: int = 0,
    drafts: int = 0,
    pace: Pace | None = None,
    prefix_cache: bool = False,
    window: int = 0,
) -> Any:
    """A real scheduler with `blocks` KV blocks of BLOCK tokens, and speculative decoding with `drafts` above 0.

    With a `pace` it decides by that and by stage times of 1 ms + 1 ms a row which requests share a round.
    With a `window` half of the model's layers look back by so many tokens only.
    """
    config = _configuration(model, max_seqs, max_tokens, stages, asynchronous, drafts, prefix_cache)
    config.additional_config = {"handoff": {"split_rows": split_rows if pace is None else "auto"}}
    if pace is not None:
        keep_stage_times(config, [[StagePoint(1, 0, 2e-3), StagePoint(2, 0, 3e-3)]] * stages)
        keep_pace(config, pace)
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    if window:
        within = SlidingWindowSpec(
            block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=window
        )
        groups.append(KVCacheGroupSpec(["other layer"], within))
    cls = HandoffScheduler if asynchronous else HandoffSyncScheduler
    return cls(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )


@dataclass
class Life:
    """One request: what it was asked, and what came back."""

    uid: int
    prompt: int
    budget: int
    stop_after: int | None  # the model ends by itself after this many tokens
    output: list[int] = field(default_factory=list)
    aborted: bool = False

    @property
    def expected(self) -> list[int]:
        length = self.budget if self.stop_after is None else min(self.budget, self.stop_after)
        return [token(self.uid, self.prompt + i) for i in range(length)]


class SimulatedPipeline:
    """The engine's loop over two stages. Call `add`, `abort`, `schedule` and `collect` in any order."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.depth = scheduler.vllm_config.max_concurrent_batches
        self.block_hasher = None
        if scheduler.cache_config.enable_prefix_caching:
            init_none_hash(sha256)
            self.block_hasher = get_request_block_hasher(BLOCK, sha256)
        self.layout = HopLayout({"hidden": 4}, torch.float32)
        self.handoffs, self.hops = Link(), Link()
        self.first, self.last = FirstStage(self), LastStage(self)
        self.handoffs.produce = self.last.run_until_sent
        self.in_flight: deque[Any] = deque()
        self.lives: dict[str, Life] = {}
        self.past: list[Life] = []
        self.rounds: list[Manifest] = []
        self.preemptions = 0
        self._computed: dict[str, int] = {}

    def add(self, req_id: str, prompt: int, budget: int, stop_after: int | None = None) -> None:
        """A request arrives. Its id may be one that was used before, if that one is over."""
        if req_id in self.lives:
            self.past.append(self.lives[req_id])
        uid = len(self.past) + len(self.lives)
        life = self.lives[req_id] = Life(uid, prompt, budget, stop_after)
        stop_ids = [] if stop_after is None else [token(uid, prompt + stop_after - 1)]
        params = SamplingParams(max_tokens=budget, temperature=0.0, stop_token_ids=stop_ids)
        prompt_ids = [token(life.uid, i) for i in range(prompt)]
        self.scheduler.add_request(
            Request(req_id, prompt_ids, params, None, arrival_time=0.0, block_hasher=self.block_hasher)
        )

    def alive(self) -> list[str]:
        """Ids of requests that the scheduler still knows."""
        return list(self.scheduler.requests)

    def abort(self, req_id: str) -> None:
        """The client goes away."""
        self.lives[req_id].aborted = True
        self.scheduler.finish_requests([req_id], RequestStatus.FINISHED_ABORTED)

    def schedule(self) -> bool:
        """Plan one more round, if the queue has room and there is anything to plan."""
        if len(self.in_flight) >= self.depth or not self.scheduler.has_requests():
            return False
        output = self.scheduler.schedule()
        manifest = manifest_of(output)
        assert manifest is not None and manifest.round == len(self.rounds)
        self.rounds.append(manifest)
        self.preemptions += len(output.preempted_req_ids or ())
        self.in_flight.append(output)
        if manifest.dispatch:
            self._computed = self.computed(output)
            self.last.queue.append((output, manifest, dict(self._computed)))
            self.first.run(output, manifest)
        return manifest.num_tokens > 0

    def collect(self) -> bool:
        """Take the oldest round's output to the scheduler."""
        if not self.in_flight:
            return False
        output = self.in_flight.popleft()
        manifest = manifest_of(output)
        assert manifest is not None
        self.last.run_until(manifest.round)
        results = self.last.outputs.pop(manifest.round, EMPTY_MODEL_RUNNER_OUTPUT)
        for outputs in self.scheduler.update_from_output(output, results).values():
            for one in outputs.outputs:
                self.lives[one.request_id].output += one.new_token_ids
        return True

    def finish(self) -> None:
        """Run until nothing is left, and check every answer and the two channels."""
        for _ in range(100_000):
            if not (self.scheduler.has_requests() or self.in_flight):
                break
            if not self.schedule():
                self.collect()
        else:
            raise AssertionError("the engine never goes idle")
        for life in [*self.past, *self.lives.values()]:
            if life.aborted:
                assert life.output == life.expected[: len(life.output)]
            else:
                assert life.output == life.expected, f"request {life.uid}: {life.output} instead of {life.expected}"
        for link in (self.handoffs, self.hops):
            assert link.operations["send"] == link.operations["receive"]
            assert not link.sent

    @staticmethod
    def computed(output: Any) -> dict[str, int]:
        """Tokens already computed of each scheduled request, as the workers are told."""
        cached = output.scheduled_cached_reqs
        known = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        known |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        return known
