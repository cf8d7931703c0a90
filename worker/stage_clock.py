"""Measures how long this stage takes for a decoding round, at start, with dummy rounds."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from vllm_handoff.scheduler_ext.policy import StagePoint

REPEATS = 5
# Rows of the rounds measured; a line through them is all the policy asks for.
ROWS_ON_GPU = (1, 32, 64, 128, 256)
ROWS_ON_CPU = (1, 16)
# The two rounds that tell what context costs: rows, and tokens of context of each.
CONTEXT_ROWS, CONTEXTS = 64, (16, 1024)
# About 20 ms, longer than a host takes to launch a round.
_SLEEP_CYCLES = 40_000_000


def measure_stage(runner: Any, device: torch.device) -> list[StagePoint]:
    """What this stage takes for decoding rounds, the head included where this stage has it.

    A row has one token, and with speculative decoding its drafts beside it,
    whose proposer runs too. On a GPU the device's own time, without transfers
    and without what the host needs to launch.
    """
    clock = _device_seconds if device.type == "cuda" else _host_seconds
    most = min(runner.max_num_reqs, runner.max_num_tokens // runner.decode_query_len)
    rows = [count for count in (ROWS_ON_GPU if device.type == "cuda" else ROWS_ON_CPU) if count <= most]
    shapes = [(count, 0) for count in rows]
    if device.type == "cuda" and runner.max_model_len > 2 * CONTEXTS[0]:
        # vLLM makes context by a copy for which its host waits, so part of what the host does afterwards is in the
        # time of either; their difference is the context's.
        shapes += [(min(CONTEXT_ROWS, most), min(context, runner.max_model_len // 2)) for context in CONTEXTS]
    points = []
    for count, context in shapes:
        run = functools.partial(_run, runner, count, context)
        run()
        # The least: whatever else the machine was doing only adds.
        seconds = min(clock(run) for _ in range(REPEATS))
        points.append(StagePoint(count, context, seconds))
    return points


@torch.inference_mode()
def _run(runner: Any, count: int, context: int) -> None:
    tokens = count * runner.decode_query_len
    hidden_states, _ = runner._dummy_run(tokens, uniform_decode=True, context_len=context, skip_eplb=True)
    if runner.is_last_pp_rank and hidden_states is not None:
        runner.model.compute_logits(hidden_states[:tokens]).argmax(dim=-1)


def _host_seconds(run: Callable[[], None]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _device_seconds(run: Callable[[], None]) -> float:
    """The device's time for what `run` launches. At start only: nothing in a round waits for the device."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    # Meanwhile the host launches everything; or else the gaps between its launches would be counted.
    torch.cuda._sleep(_SLEEP_CYCLES)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000
