"""Two stages in two processes whose hosts stop at random: hop and handoff over gloo, and over NCCL given a GPU.

No vLLM model and no scheduler: a round's hidden states are known functions of
its tokens, and its tokens of the hidden states, so one wrong transfer changes
all that follows. Stage 0 runs ahead by two rounds. What hosts do when a kernel
is loaded at its first use, wait for all of their streams, both do at places of
their own here: no order of that may let them wait in a circle.
"""

from __future__ import annotations

import multiprocessing as mp
import random
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from vllm_handoff.scheduler_ext.manifest import Manifest, Row, Rows
from vllm_handoff.worker import shared_gpu
from vllm_handoff.worker.handoff import HandoffReceiver, HandoffSender
from vllm_handoff.worker.hop import HopLayout, HopReceiver, HopSender
from vllm_handoff.worker.rendezvous import widen_queues
from vllm_handoff.worker.transfer import Link, Peer, warm_up

LAG = 2
ROWS = 8
MODULUS = 1021  # hidden states are float32, exact below 2**24
WIDE = 2048  # columns: 4096 rows of them are above any of NCCL's buffers
LAYOUT = HopLayout({"hidden_states": WIDE}, torch.float32)
MOST_TOKENS = 4096


def rounds_of(seed: int, count: int) -> list[Manifest]:
    """Rounds of the same requests, of them some with a long prefill beside."""
    rng = random.Random(seed)
    rows = Rows.of(*(Row(f"r{index}", 0, True) for index in range(ROWS)))
    return [
        Manifest(
            number,
            rng.choice((ROWS, ROWS, ROWS, 600, MOST_TOKENS)),
            rows=rows,
            needs=(number - LAG,) if number >= LAG else (),
        )
        for number in range(count)
    ]


def expected(rounds: list[Manifest]) -> list[list[int]]:
    """Each round's tokens."""
    tokens: list[list[int]] = []
    for number in range(len(rounds)):
        before = tokens[number - LAG] if number >= LAG else list(range(ROWS))
        tokens.append([(7 * token + number + row) % MODULUS for row, token in enumerate(before)])
    return tokens


def first_stage(rounds: list[Manifest], links: dict[str, Link], device: torch.device, stop: Any) -> None:
    hop = HopSender(links["hop"], LAYOUT, MOST_TOKENS, device, 2, few_tokens=64, small_buffers=4)
    receiver = HandoffReceiver(links["handoff"], device, 0, num_slots=ROWS)
    slots = np.arange(ROWS)
    receiver.admit(slots, 0)
    # The newest tokens of each lot of rounds: rounds `LAG` apart belong together.
    newest = [torch.arange(ROWS, dtype=torch.int64, device=device) for _ in range(LAG)]
    for manifest in rounds:
        stop()
        for sampled, _ in receiver.take(manifest.needs):
            newest[manifest.round % LAG][sampled.idx_mapping] = sampled.sampled_tokens[:, 0]
        stop()
        states = torch.zeros(manifest.num_tokens, WIDE, device=device)
        states[:ROWS] = newest[manifest.round % LAG].float().unsqueeze(1) * 7
        stop()
        hop.send(manifest.round, {"hidden_states": states}, manifest.num_tokens)
        stop()
        receiver.announce(manifest, slots)
        stop()
    receiver.drain()


def last_stage(rounds: list[Manifest], links: dict[str, Link], device: torch.device, stop: Any) -> list[list[int]]:
    receiver = HopReceiver(links["hop"], LAYOUT, MOST_TOKENS, device)
    sender = HandoffSender([links["handoff"]], device)
    ones = torch.ones(ROWS, dtype=torch.int32, device=device)
    rows = torch.arange(ROWS, device=device)
    outputs = []
    for manifest in rounds:
        stop()
        tensors, pending = receiver.post(manifest.round, manifest.num_tokens)
        stop()
        pending.wait()
        states = tensors["hidden_states"][: manifest.num_tokens].clone()
        stop()
        # Both extremes, so that no column may be wrong.
        both = (states[:ROWS].amax(dim=1) + states[:ROWS].amin(dim=1)).long() // 2
        tokens = (both + manifest.round + rows) % MODULUS
        sender.send(manifest, tokens.unsqueeze(1), ones, ones * 0)
        stop()
        outputs.append(tokens)
    return [tokens.tolist() for tokens in outputs]


def _links(transport: str, rank: int, device: torch.device) -> dict[str, Link]:
    if transport == "gloo":
        groups = {name: dist.new_group([0, 1]) for name in ("hop", "handoff")}
        warm_up(groups["hop"], [(0, 1)], device)
        warm_up(groups["handoff"], [(1, 0)], device)
        return {name: Peer(group, 1 - rank, 1 - rank) for name, group in groups.items()}
    from vllm_handoff.worker import nccl_peer

    group = dist.new_group([0, 1])
    made = nccl_peer.connect({"hop": [(0, 1)], "handoff": [(1, 0)]}, group, device, meet=transport == "NCCL")
    return {name: link for (name, _, _), link in made.items()}


def _stage(rank: int, transport: str, seed: int, count: int, store: str, answers: Any) -> None:
    try:
        device = torch.device("cpu")
        if transport != "gloo":
            if (gpus := torch.cuda.device_count()) < 2:
                shared_gpu.share(rank)
            widen_queues()
            device = torch.device("cuda", rank % gpus)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        links = _links(transport, rank, device)
        rng = random.Random(f"{seed} {rank}")

        def stop() -> None:
            if device.type == "cuda" and rng.random() < 0.15:
                torch.cuda.synchronize(device)

        rounds = rounds_of(seed, count)
        answer = (first_stage, last_stage)[rank](rounds, links, device, stop)
        answers.put((rank, answer))
        dist.barrier()
    except BaseException as error:
        answers.put((rank, "".join(traceback.format_exception(error))))


def run(tmp_path: Path, transport: str, seed: int, count: int) -> Any:
    """The last stage's tokens, or a traceback."""
    context: Any = mp.get_context("fork" if transport == "gloo" else "spawn")
    answers: Any = context.SimpleQueue()
    store = str(tmp_path / f"store-{seed}")
    stages = [context.Process(target=_stage, args=(rank, transport, seed, count, store, answers)) for rank in range(2)]
    for stage in stages:
        stage.start()
    try:
        found = dict(answers.get() for _ in stages)
    finally:
        for stage in stages:
            stage.kill()
            stage.join()
    assert found[0] is None, found[0]
    return found[1]


A_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU")


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("transport", "count"),
    [
        ("gloo", 60),
        pytest.param("NCCL", 2000, marks=A_GPU),
        pytest.param("NCCL without rendezvous", 500, marks=A_GPU),
    ],
)
def test_every_token_arrives_whatever_makes_hosts_stop(tmp_path: Path, transport: str, count: int) -> None:
    for seed in (1, 2):
        assert run(tmp_path, transport, seed, count) == expected(rounds_of(seed, count))
