"""What a token costs the engine's process in its scheduler, vLLM's beside ours, in one run.

Both schedulers plan and collect decoding rounds for the same requests, without
an engine, workers or a GPU: four rounds in flight, two stages, every token
made up. Ours also writes the manifests. Printed is the time for each token, in
microseconds: all rounds together, those too that vLLM's plans empty.

  plan      schedule()
  collect   update_from_output()

Scheduler by scheduler in turns, the median of all turns. A ratio below 1 says that ours takes less.

examples:
  python -m vllm_handoff.benchmarks.scheduling
  python -m vllm_handoff.benchmarks.scheduling --requests 256 --no-prefix-cache
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import Any

PROMPT = 32
BLOCK = 16
DEPTH = 4
WARM_UP = 16


def make_scheduler(cls: type, model: Path, requests: int, prefix_cache: bool, window: int = 0) -> Any:
    """A scheduler for two stages with room for everything.

    Args:
        window: tokens that half of the layers look back by; 0: all layers see everything.
    """
    import torch
    from vllm.config import CacheConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config = VllmConfig(
        model_config=ModelConfig(model=str(model), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=8192),
        scheduler_config=SchedulerConfig(
            max_num_seqs=requests, max_num_batched_tokens=max(8192, requests * PROMPT), max_model_len=8192,
            is_encoder_decoder=False, async_scheduling=True,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=prefix_cache),
        parallel_config=ParallelConfig(pipeline_parallel_size=2, distributed_executor_backend="mp"),
    )  # fmt: skip
    config.scheduler_config.async_scheduling = True
    config.cache_config.num_gpu_blocks = requests * 200
    shape: dict[str, Any] = dict(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.bfloat16)
    groups = [KVCacheGroupSpec(["layer"], FullAttentionSpec(**shape))]
    if window:
        groups.append(KVCacheGroupSpec(["other layer"], SlidingWindowSpec(sliding_window=window, **shape)))
    kv = KVCacheConfig(requests * 200, kv_cache_tensors=[], kv_cache_groups=groups)
    return cls(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
    )


def add_requests(scheduler: Any, requests: int, generated: int, prefix_cache: bool) -> None:
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256) if prefix_cache else None
    for number in range(requests):
        params = SamplingParams(temperature=0.0, max_tokens=generated, ignore_eos=True)
        ids = [10 + number] * PROMPT
        # As long as the ids that vLLM's server gives.
        scheduler.add_request(
            Request(f"cmpl-{number:032x}-0-{number:08x}", ids, params, None, arrival_time=0.0, block_hasher=hasher)
        )


def measure(scheduler: Any, tokens: int) -> tuple[float, float]:
    """Seconds of planning and of collecting a token, over about `tokens` of them, once the prompts are in."""
    from vllm.v1.outputs import ModelRunnerOutput

    in_flight: deque[Any] = deque()
    planned = collected = 0.0
    rounds = sampled = 0
    gc.collect()
    # As vLLM does in its engine: what has been made so far is not looked at again.
    gc.freeze()
    while sampled < tokens:
        begin = time.perf_counter()
        output = scheduler.schedule()
        end = time.perf_counter()
        in_flight.append(output)
        counts = rounds >= WARM_UP
        rounds += 1
        planned += (end - begin) * counts
        if len(in_flight) < DEPTH:
            continue
        output = in_flight.popleft()
        ids = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={req_id: index for index, req_id in enumerate(ids)},
            sampled_token_ids=[[7] for _ in ids],
        )
        begin = time.perf_counter()
        scheduler.update_from_output(output, result)
        end = time.perf_counter()
        collected += (end - begin) * counts
        sampled += len(ids) * counts
    gc.unfreeze()
    return planned / sampled, collected / sampled


def main() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from vllm_handoff.benchmarks.loads import write_shape
    from vllm_handoff.scheduler_ext.scheduler import HandoffScheduler

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[16, 64, 256, 512], help="that decode at once (default: %(default)s)"
    )
    parser.add_argument("--turns", type=int, default=5, help="of each scheduler (default: %(default)s)")
    parser.add_argument("--trips", type=int, default=150, help="tokens of each request to time (default: %(default)s)")
    parser.add_argument(
        "--window", type=int, default=0, metavar="TOKENS", help="half of the layers look back by so many only"
    )
    parser.add_argument("--no-prefix-cache", action="store_true", help="as with --no-enable-prefix-caching")
    parser.add_argument("--json", help="also write the numbers to this file")
    arguments = parser.parse_args()
    sides = {"vllm": AsyncScheduler, "handoff": HandoffScheduler}
    logging.getLogger("vllm").setLevel(logging.ERROR)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = write_shape("8b", Path(folder))
        print(f"{'requests':>8} {'':8} {'vllm':>8} {'handoff':>8} {'ratio':>6}")
        for requests in arguments.requests:
            times: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
            for _ in range(arguments.turns):
                for side, cls in sides.items():
                    scheduler = make_scheduler(cls, model, requests, not arguments.no_prefix_cache, arguments.window)
                    add_requests(scheduler, requests, arguments.trips * 3, not arguments.no_prefix_cache)
                    times[side].append(measure(scheduler, requests * arguments.trips))
            medians = {side: [1e6 * statistics.median(part) for part in zip(*of)] for side, of in times.items()}
            found[str(requests)] = {side: dict(zip(("plan", "collect"), of)) for side, of in medians.items()}
            vllm, ours = ([*of, sum(of)] for of in medians.values())
            for name, theirs, own in zip(("plan", "collect", "both"), vllm, ours, strict=True):
                print(f"{requests:8} {name:8} {theirs:8.2f} {own:8.2f} {own / theirs:6.2f}", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
