"""Large payloads through shared memory, and what becomes of them where there is none."""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fake_worker import SchedulerOutput, rounds
from vllm_handoff.executor import pickling, shared_payload
from vllm_handoff.executor.errors import ProtocolError
from vllm_handoff.executor.shared_payload import CAPACITY, LEAST, SharedPayload, SharedPayloadReader

FOLDER = f"/tmp/test-shared-{os.getpid()}"
LARGE = b"x" * LEAST

TENSORS = {
    "an image": torch.rand(300, 400, 3),
    "a number": torch.tensor(3),
    "nothing": torch.zeros(0, 3),
    "bfloat16": torch.randn(3, 4).to(torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "complex": torch.randn(2, dtype=torch.complex64),
    "every other": torch.arange(10)[::2],
    "transposed": torch.randn(400, 500).t(),
    "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
    "with a gradient": torch.randn(3, requires_grad=True),
    "sparse": torch.eye(3).to_sparse(),
    "a parameter": nn.Parameter(torch.randn(2)),
}
OTHERS: dict[str, Any] = {
    "plain": {"a": [1, 2.5, "x", None], "b": range(3)},
    "bytes": LARGE,
    "an array": np.arange(300_000).reshape(3, -1),
    "a transposed array": np.arange(300_000).reshape(3, -1).T,
    "a read-only array": np.frombuffer(LARGE, np.uint8),
}


@pytest.fixture
def writer() -> Iterator[SharedPayload]:
    writer = SharedPayload(FOLDER)
    yield writer
    writer.close()
    shared_payload._path(FOLDER).unlink(missing_ok=True)


def _there_and_back(writer: SharedPayload, value: Any) -> list[Any]:
    """Through shared memory, padded if need be, and through a frame."""
    padding = bytes(LEAST)
    size = writer.put(pickling.pieces([value, value, padding]))
    assert size >= LEAST
    shared = pickle.loads(SharedPayloadReader(FOLDER).payload(size))
    # What was read is nobody's but the reader's.
    writer.release()
    writer.put([b"\xff" * size])
    writer.release()
    return [shared, pickle.loads(b"".join(pickling.pieces([value, value, padding])))]


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_tensors(writer: SharedPayload, tensor: torch.Tensor) -> None:
    for found, same, _ in _there_and_back(writer, tensor):
        assert found is same and type(found) is type(tensor)
        assert (found.dtype, found.layout, found.requires_grad) == (tensor.dtype, tensor.layout, tensor.requires_grad)
        assert torch.equal(found.to_dense(), tensor.to_dense())
        if not tensor.requires_grad and tensor.layout == torch.strided:
            found.zero_()


@pytest.mark.parametrize("value", OTHERS.values(), ids=OTHERS.keys())
def test_other_objects(writer: SharedPayload, value: Any) -> None:
    for found, _, _ in _there_and_back(writer, value):
        np.testing.assert_equal(found, value)


def test_a_part_of_a_tensor_takes_its_own_bytes_and_few_more() -> None:
    assert len(b"".join(pickling.pieces(torch.zeros(1000, 1000)[0]))) < 4 * 1000 + 300


def test_what_has_no_importable_name_goes_by_value() -> None:
    assert pickle.loads(b"".join(pickling.pieces(lambda number: number + 1)))(1) == 2


def test_one_payload_at_a_time(writer: SharedPayload) -> None:
    assert writer.put([b"a", LARGE]) == LEAST + 1
    assert writer.put([LARGE]) == 0
    writer.release()
    assert writer.put([LARGE]) == LEAST


def test_what_is_too_small_or_too_large_takes_the_sockets(writer: SharedPayload) -> None:
    assert writer.put([LARGE[1:]]) == 0
    assert writer.put([LARGE] * (CAPACITY // LEAST) + [b"1"]) == 0
    assert writer.put([LARGE] * (CAPACITY // LEAST)) == CAPACITY


def test_a_full_file_system(writer: SharedPayload, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert writer.put([LARGE]) == 0
    assert writer.put([LARGE]) == LEAST


def test_no_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_payload, "_SHARED_MEMORY", Path("/nowhere"))
    writer = SharedPayload(FOLDER)
    assert writer.put([LARGE]) == 0
    writer.close()
    with pytest.raises(ProtocolError, match="announces 5 bytes in shared memory, which has 0"):
        SharedPayloadReader(FOLDER).payload(5)


def test_a_file_that_somebody_else_has_made() -> None:
    path = shared_payload._path(FOLDER)
    path.touch()
    try:
        writer = SharedPayload(FOLDER)
        assert writer.put([LARGE]) == 0
        with pytest.raises(ProtocolError, match="which has 0"):
            SharedPayloadReader(FOLDER).payload(5)
    finally:
        path.unlink()


@pytest.mark.parametrize("size", [-1, 0, CAPACITY + 1])
def test_a_size_that_cannot_be(writer: SharedPayload, size: int) -> None:
    with pytest.raises(ProtocolError, match=f"announces {size} bytes"):
        SharedPayloadReader(FOLDER).payload(size)


@pytest.mark.timeout(120)
def test_large_rounds_in_flight_reach_every_worker() -> None:
    notes = [bytes([65 + i]) * (LEAST + i) for i in range(6)]
    with rounds() as (dispatcher, plane):
        sizes = []
        put = plane.shared.put
        plane.shared.put = lambda pieces: sizes.append(put(pieces)) or sizes[-1]  # type: ignore[func-returns-value, method-assign]
        futures = []
        for note in notes[:4]:
            # All ranks reply: these do not wait for each other, as stages do.
            dispatcher.execute_model(SchedulerOutput(note=note), aggregate=list)
            futures.append(dispatcher.sample_tokens(None))
        for note, future in zip(notes, futures, strict=False):
            assert [(answer["note"] == note, answer["rank"]) for answer in future.result()] == [(True, 0), (True, 1)]
        for note in notes[4:]:
            dispatcher.execute_model(SchedulerOutput(note=note), aggregate=list)
            assert all(answer["note"] == note for answer in dispatcher.sample_tokens(None).result())
    # The first has the room, those after it take the sockets; later it is free again.
    assert sizes[0] > LEAST and sizes[4] > LEAST and sizes[5] > LEAST
    assert sizes[1:4].count(0) >= 1
    assert not list(Path("/dev/shm").glob(f"{Path(plane.folder.path).name}*"))
