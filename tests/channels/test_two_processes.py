"""Hop and handoff between two real processes over gloo."""

from __future__ import annotations

import multiprocessing as mp
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from vllm_handoff.scheduler_ext.manifest import HEADER_MAGIC, Manifest, Row, Rows
from vllm_handoff.worker.handoff import HandoffMismatchError, HandoffReceiver, HandoffSender, pack, unpack
from vllm_handoff.worker.hop import HopLayout, HopReceiver, HopSender
from vllm_handoff.worker.shared_gloo import share_gloo_device
from vllm_handoff.worker.transfer import MOST_UNDER_WAY, Peer, TransferError, warm_up

CPU = torch.device("cpu")
KEEP: list[Any] = []  # gloo cancels a send whose handle goes away, so senders live as long as their process
GONE = "gone"
LAYOUT = HopLayout({"residual": 3, "hidden_states": 5}, torch.float32)


def manifest(number: int, rows: int = 3, tokens: int = 3, feeds: bool = True) -> Manifest:
    """A round whose requests r0, r1, ... were all admitted in round 0."""
    return Manifest(number, tokens, rows=Rows.of(*(Row(f"r{i}", 0, feeds or i == 0) for i in range(rows))))


def _member(rank: int, store: str, role: Callable[[int, dist.ProcessGroup], Any], answers: Any) -> None:
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
        group = dist.new_group([0, 1])
        warm_up(group, [(0, 1), (1, 0)], CPU)
        answer = role(rank, group)
        answers.put((rank, answer, None))
        if answer != GONE:
            dist.barrier()  # stay until the peer has what was sent to it
    except BaseException as error:
        answers.put((rank, None, "".join(traceback.format_exception(error))))


def run_pair(tmp_path: Path, role: Callable[[int, dist.ProcessGroup], Any], expect_errors: bool = False) -> list[Any]:
    """Run `role(rank, group)` in two processes; their answers by rank, or their tracebacks."""
    context = mp.get_context("fork")
    answers: Any = context.SimpleQueue()
    members = [
        context.Process(target=_member, args=(rank, str(tmp_path / "store"), role, answers)) for rank in range(2)
    ]
    for member in members:
        member.start()
    found: dict[int, tuple] = {}
    try:
        for _ in members:
            rank, answer, error = answers.get()
            found[rank] = (answer, error)
            if error and not expect_errors:
                raise AssertionError(f"rank {rank}:\n{error}")
    finally:
        for member in members:
            member.kill()
            member.join()
    return [found[rank][1 if found[rank][1] else 0] for rank in range(2)]


def _hop_role(rank: int, group: dist.ProcessGroup) -> Any:
    sizes = [1, 7, 16, 2, 2, 9, 16, 1] * 25
    if rank == 0:
        sender = HopSender(Peer(group, 1, 1), LAYOUT, 16, CPU, buffers=2)
        KEEP.append(sender)
        for number, size in enumerate(sizes):
            rows = torch.arange(size).float().unsqueeze(1) + 100 * number
            # The model's own output has more rows than the round: padding does not travel.
            padded = torch.cat([rows, torch.full((3, 1), -1.0)])
            sender.send(number, {"hidden_states": padded.expand(-1, 5), "residual": -padded.expand(-1, 3)}, size)
        return None
    receiver = HopReceiver(Peer(group, 0, 0), LAYOUT, 16, CPU)
    for number, size in enumerate(sizes):
        tensors, pending = receiver.post(number, size)
        pending.wait()
        rows = torch.arange(size).float().unsqueeze(1) + 100 * number
        assert torch.equal(tensors["hidden_states"][:size], rows.expand(-1, 5))
        assert torch.equal(tensors["residual"][:size], -rows.expand(-1, 3))
        assert tensors["hidden_states"].shape == (16, 5)
    return len(sizes)


@pytest.mark.timeout(120)
def test_hop_carries_every_round_in_order(tmp_path: Path) -> None:
    assert run_pair(tmp_path, _hop_role) == [None, 200]


def _handoff_role(rank: int, group: dist.ProcessGroup) -> Any:
    rounds = [manifest(number, rows=1 + number % 5) for number in range(100)]
    if rank == 1:
        sender = HandoffSender([Peer(group, 0, 0)], CPU)
        KEEP.append(sender)
        for m in rounds:
            count = len(m.rows)
            tokens = torch.arange(count).unsqueeze(1) + 10 * m.round
            sender.send(m, tokens, torch.ones(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32))
        return None
    receiver = HandoffReceiver(Peer(group, 1, 1), CPU, 0, num_slots=8)
    slots = np.array([7, 6, 5, 4, 3])
    receiver.admit(slots, 0)
    seen = 0
    for m in rounds:
        receiver.announce(m, slots[: len(m.rows)])
        if m.round % 3 != 2:
            continue
        for taken, (sampled, _) in enumerate(receiver.take([m.round - 2, m.round - 1, m.round])):
            number = m.round - 2 + taken
            count = 1 + number % 5
            assert sampled.idx_mapping.tolist() == [7 - i for i in range(count)]
            assert sampled.sampled_tokens[:, 0].tolist() == [10 * number + i for i in range(count)]
            assert sampled.num_sampled.tolist() == [1] * count
            assert sampled.num_rejected.tolist() == [0] * count
            seen += 1
    receiver.drain()
    return seen


@pytest.mark.timeout(120)
def test_handoffs_are_applied_when_needed(tmp_path: Path) -> None:
    assert run_pair(tmp_path, _handoff_role) == [99, None]


def _dropping_role(rank: int, group: dist.ProcessGroup) -> Any:
    m = Manifest(4, 4, rows=Rows.of(*(Row(f"r{i}", 0, i != 3) for i in range(4))))  # r3's sample feeds nobody
    if rank == 1:
        ones = torch.ones(4, dtype=torch.int32)
        KEEP.append(HandoffSender([Peer(group, 0, 0)], CPU))
        KEEP[0].send(m, torch.arange(4).unsqueeze(1), ones, ones * 0)
        return None
    receiver = HandoffReceiver(Peer(group, 1, 1), CPU, 0, num_slots=8)
    receiver.admit([5, 6, 7, 2], 0)
    receiver.announce(m, np.array([5, 6, 7, 2]))
    receiver.forget(6)  # gone
    receiver.forget(7)
    receiver.admit([7], 5)  # gone, and its slot in use again
    return [sampled.idx_mapping.tolist() for sampled, _ in receiver.take([4])]


def _drafts_role(rank: int, group: dist.ProcessGroup) -> Any:
    m = Manifest(4, 9, width=3, rows=Rows.of(*(Row(f"r{i}", 0, True) for i in range(3))))
    if rank == 1:
        KEEP.append(HandoffSender([Peer(group, 0, 0)], CPU))
        tokens = torch.tensor([[1, 2, 3], [4, 0, 0], [5, 6, 0]])
        drafts = torch.tensor([[11, 12], [13, 14], [15, 16]])
        KEEP[0].send(m, tokens, torch.tensor([3, 1, 2]), torch.tensor([0, 2, 1]), drafts)
        return None
    receiver = HandoffReceiver(Peer(group, 1, 1), CPU, 0, num_slots=8)
    receiver.admit([5, 6, 7], 0)
    receiver.announce(m, np.array([5, 6, 7]))
    receiver.forget(5)  # and the slot is given to another request
    receiver.admit([5], 5)
    [(sampled, drafts)] = receiver.take([4])
    assert drafts is not None
    kept = torch.full((8, 2), -9)
    kept[drafts.slots] = drafts.tokens
    return sampled.idx_mapping.tolist(), [row.tolist() for row in sampled[1:]], drafts.tokens.shape, kept[5:].tolist()


@pytest.mark.timeout(120)
def test_drafts_travel_with_the_tokens_and_go_to_the_living_alone(tmp_path: Path) -> None:
    found, _ = run_pair(tmp_path, _drafts_role)
    assert found == (
        [-1, 6, 7],
        [[[1, 2, 3], [4, 0, 0], [5, 6, 0]], [3, 1, 2], [0, 2, 1]],
        (3, 2),
        [[-9, -9], [13, 14], [15, 16]],
    )


@pytest.mark.timeout(120)
def test_rows_of_requests_that_went_away_are_dropped(tmp_path: Path) -> None:
    assert run_pair(tmp_path, _dropping_role) == [[[5, -1, -1, -1]], None]


def _mismatch_role(rank: int, group: dist.ProcessGroup) -> Any:
    if rank == 1:
        ones = torch.ones(3, dtype=torch.int32)
        KEEP.append(HandoffSender([Peer(group, 0, 0)], CPU))
        KEEP[0].send(manifest(8), torch.arange(3).unsqueeze(1), ones, ones * 0)
        return None
    receiver = HandoffReceiver(Peer(group, 1, 1), CPU, 0, num_slots=3)
    receiver.admit([0, 1, 2], 0)
    receiver.announce(manifest(9), np.arange(3))
    list(receiver.take([9]))


@pytest.mark.timeout(120)
def test_a_handoff_of_another_round_ends_with_both_named(tmp_path: Path) -> None:
    error = run_pair(tmp_path, _mismatch_role, expect_errors=True)[0]
    assert HandoffMismatchError.__name__ in error
    assert "of round 9" in error
    assert "of round 8" in error


def _polling_threads() -> int:
    tasks = Path("/proc/self/task").iterdir()
    return sum((task / "comm").read_text().strip() == "gloo_tcp_loop" for task in tasks)


def _shared_device_role(rank: int, group: dist.ProcessGroup) -> Any:
    before = _polling_threads()
    share_gloo_device()
    share_gloo_device()
    groups = [dist.new_group([0, 1]) for _ in range(4)]
    for number, one in enumerate(groups):
        peer = Peer(one, 1 - rank, 1 - rank)
        if rank == 0:
            peer.send(torch.full((3,), number), "shared")
            KEEP.append(peer)
        else:
            found = torch.zeros(3, dtype=torch.int64)
            peer.post_receive(found, "shared").wait()
            assert found.tolist() == [number] * 3
        assert isinstance(one, dist.ProcessGroup)
    total = torch.ones(1)
    dist.all_reduce(total, group=groups[0])
    return total.item(), _polling_threads() - before


@pytest.mark.timeout(120)
def test_groups_share_one_gloo_device(tmp_path: Path) -> None:
    assert run_pair(tmp_path, _shared_device_role) == [(2.0, 1), (2.0, 1)]


def _many_role(rank: int, group: dist.ProcessGroup) -> Any:
    peer = Peer(group, 1 - rank, 1 - rank)
    for number in range(200):
        tensor = torch.full((2,), number)
        if rank == 1:
            peer.send(tensor, f"round {number}")
        else:
            peer.post_receive(tensor, f"round {number}").wait()
    KEEP.append(peer)
    return len(peer._sending)


@pytest.mark.timeout(120)
def test_finished_sends_are_let_go(tmp_path: Path) -> None:
    assert run_pair(tmp_path, _many_role)[1] <= MOST_UNDER_WAY


def _twice_role(rank: int, group: dist.ProcessGroup) -> Any:
    peer = Peer(group, 1 - rank, 1 - rank)
    for number in range(3):
        tensor = torch.full((2,), number)
        if rank == 1:
            peer.post_receive(tensor, "twice").wait()
            continue
        handle = peer.send(tensor, "twice")
        handle.wait()
        handle.wait()
        KEEP.append(peer)
    return rank


@pytest.mark.timeout(120)
def test_a_send_may_be_waited_for_twice(tmp_path: Path) -> None:
    assert run_pair(tmp_path, _twice_role) == [0, 1]


class Posted:
    """A link that only remembers what was posted."""

    description = "nothing"

    def __init__(self) -> None:
        self.what: list[str] = []

    def send(self, tensor: torch.Tensor, what: str) -> Any:
        raise AssertionError("a receiver sends nothing")

    def post_receive(self, tensor: torch.Tensor, what: str) -> Any:
        self.what.append(f"{what}, {tensor.numel()}")


def test_a_receive_is_posted_in_its_own_round() -> None:
    link = Posted()
    receiver = HandoffReceiver(link, CPU, 0, num_slots=3)
    receiver.admit([0, 1, 2], 0)
    receiver.announce(manifest(3), np.arange(3))
    assert link.what == [f"round 3, handoff, {manifest(3).payload_size}"]


def test_needing_a_round_that_is_not_next_is_an_error() -> None:
    receiver = HandoffReceiver(Posted(), CPU, 0, num_slots=3)
    receiver.admit([0, 1, 2], 0)
    receiver.announce(manifest(3), np.arange(3))
    with pytest.raises(TransferError, match=r"round 4 is needed next, but under way are \[3\]"):
        list(receiver.take([4]))


def test_another_life_of_a_request_than_the_manifest_names_is_an_error() -> None:
    receiver = HandoffReceiver(Posted(), CPU, 0, num_slots=3)
    receiver.admit([0, 1], 0)
    receiver.admit([2], 1)
    with pytest.raises(TransferError, match="holds generation 1 of r2, the manifest names 0"):
        receiver.announce(manifest(3), np.arange(3))


def _lost_peer_role(rank: int, group: dist.ProcessGroup) -> Any:
    if rank == 0:
        return GONE
    receiver = HopReceiver(Peer(group, 0, 0), LAYOUT, 16, CPU)
    _, pending = receiver.post(5, 2)
    pending.wait()


@pytest.mark.timeout(120)
def test_a_lost_peer_is_named_with_the_round(tmp_path: Path) -> None:
    answers = run_pair(tmp_path, _lost_peer_role, expect_errors=True)
    assert "round 5, hop: receiving from stage 0 failed" in answers[1]


def test_a_layout_of_mixed_dtypes_is_refused() -> None:
    with pytest.raises(ValueError, match="one dtype"):
        HopLayout.of({"a": torch.zeros(1, 2), "b": torch.zeros(1, 2, dtype=torch.int64)})


def test_the_header_magic_fits_the_payload() -> None:
    assert torch.tensor([HEADER_MAGIC], dtype=torch.int64).item() == HEADER_MAGIC


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 5), st.sampled_from([torch.int32, torch.int64]))
def test_what_is_packed_is_unpacked(rows: int, width: int, columns: int, counts: torch.dtype) -> None:
    packed = Manifest(
        round=7, num_tokens=rows * width, width=width, rows=Rows.of(*(Row(f"r{i}", 0, True) for i in range(rows)))
    )
    columns = min(columns, width)
    tokens = torch.randint(-1, 2**40, (rows, columns))
    sampled, rejected = (torch.randint(0, 9, (rows,), dtype=counts) for _ in range(2))
    drafts = torch.randint(0, 2**40, (rows, width - 1)) if width > 1 else None
    payload = pack(packed, torch.tensor(packed.header), tokens, sampled, rejected, drafts)
    assert payload.nbytes == packed.payload_bytes
    found = unpack(packed, payload)
    assert found[0][:, :columns].equal(tokens) and not found[0][:, columns:].any()
    assert found[1].tolist() == sampled.tolist() and found[2].tolist() == rejected.tolist()
    if drafts is not None:
        assert found[3].equal(drafts)
