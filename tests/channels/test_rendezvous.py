"""Rendezvous: the counters, over words in memory that stand for what two devices see."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_handoff.worker.rendezvous import Rendezvous, SharedPage, probe, widen_queues

BASE = 4096


class Words:
    """Streams of operations on 32-bit words, carried out one at a time in any order that streams allow."""

    def __init__(self) -> None:
        self.words: dict[int, int] = {}
        self.streams: dict[int, deque[tuple[str, int, int]]] = {}

    def write(self, stream: int, address: int, value: int) -> None:
        assert 0 <= value < 2**32
        self.streams.setdefault(stream, deque()).append(("write", address, value))

    def wait(self, stream: int, address: int, value: int) -> None:
        self.streams.setdefault(stream, deque()).append(("wait", address, value))

    def transfer(self, stream: int, number: int) -> None:
        self.streams[stream].append(("transfer", number, 0))

    def ready(self) -> list[int]:
        return [stream for stream, queue in self.streams.items() if queue and self._passes(*queue[0])]

    def step(self, stream: int) -> tuple[str, int, int]:
        operation = self.streams[stream].popleft()
        if operation[0] == "write":
            self.words[operation[1]] = operation[2]
        return operation

    def _passes(self, kind: str, address: int, value: int) -> bool:
        if kind != "wait":
            return True
        ahead = (self.words.get(address, 0) - value) % 2**32
        return ahead < 2**31  # the driver compares cyclically


@given(st.data(), st.integers(0, 2**32 - 1))
def test_a_transfer_starts_when_both_ends_are_there_and_never_before(data: st.DataObject, begin: int) -> None:
    words = Words()
    ends = [Rendezvous(words, BASE, end) for end in (0, 1)]
    for end in ends:
        end._count = begin  # so that the counter's end is met as well
    words.words = {end._mine: begin for end in ends}
    count = 4
    for stream, end in enumerate(ends):
        for number in range(count):
            end.meet(stream)
            words.transfer(stream, number)
    arrived = [0, 0]
    started = [0, 0]
    while ready := words.ready():
        stream = data.draw(st.sampled_from(ready))
        kind, number, _ = words.step(stream)
        if kind == "write":
            arrived[stream] += 1
        if kind == "transfer":
            assert arrived[1 - stream] > number
            started[stream] += 1
    assert started == [count, count], "an end waits for ever"


def test_the_ends_use_words_of_their_own_in_different_cache_lines() -> None:
    words = Words()
    ends = [Rendezvous(words, BASE, end) for end in (0, 1)]
    assert {end._mine for end in ends} == {end._theirs for end in ends}
    assert abs(ends[0]._mine - ends[0]._theirs) >= 64
    probe(words, BASE, 7)
    assert words.ready() == [7]
    assert not {address for _, address, _ in words.streams[7]} & {end._mine for end in ends}


def test_a_page_is_shared_with_another_process_and_leaves_nothing() -> None:
    page = SharedPage.create()
    pid = os.fork()
    if pid == 0:
        SharedPage.open(page.path).memory[5] = 42
        os._exit(0)
    os.waitpid(pid, 0)
    assert page.memory[5] == 42
    path = page.path
    page.forget_path()
    assert not Path(path).exists()
    assert page.memory[5] == 42


def test_the_users_choice_of_queues_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    widen_queues()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
    widen_queues()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
