"""Measures how long this stage takes for a decoding round, at start, with dummy rounds."""

from __future__ import annotations

import time
from typing import Any

import torch

REPEATS = 5
# The widest rounds measured; a line through these is all the policy asks for.
ROWS_ON_GPU = (1, 32, 64, 128, 256)
ROWS_ON_CPU = (1, 16)


def measure_stage(runner: Any, device: torch.device) -> list[tuple[int, float]]:
    """(rows, seconds) of this stage for decoding rounds, the head included where this stage has it.

    A row has one token, and with speculative decoding its drafts beside it,
    whose proposer runs too. Without transfers and with the shortest context,
    so a real round takes longer.
    """
    most = min(runner.max_num_reqs, runner.max_num_tokens // runner.decode_query_len)
    rows = [count for count in (ROWS_ON_GPU if device.type == "cuda" else ROWS_ON_CPU) if count <= most]
    points = []
    for count in rows:
        _run(runner, count)
        seconds = []
        for _ in range(REPEATS):
            _settle(device)
            begin = time.perf_counter()
            _run(runner, count)
            _settle(device)
            seconds.append(time.perf_counter() - begin)
        # The least: whatever else the machine was doing only adds.
        points.append((count, min(seconds)))
    return points


@torch.inference_mode()
def _run(runner: Any, count: int) -> None:
    tokens = count * runner.decode_query_len
    hidden_states, _ = runner._dummy_run(tokens, uniform_decode=True, skip_eplb=True)
    if runner.is_last_pp_rank and hidden_states is not None:
        runner.model.compute_logits(hidden_states[:tokens]).argmax(dim=-1)


def _settle(device: torch.device) -> None:
    # At start only; nothing in a round waits for the device.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
