"""The hop: a round's hidden states, from a stage to the next.

Shapes and dtypes are known on both sides (rows from the manifest, columns
from the model), so after start-up nothing but the states themselves travels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from vllm_handoff.worker.transfer import Handle, Link


class Segment(NamedTuple):
    """The columns of one tensor within a buffer's rows."""

    key: str
    start: int
    stop: int


class HopLayout:
    """How the tensors that cross a stage boundary lie side by side in the rows of one buffer.

    A row holds all that crosses for one token, so any number of rows is one
    contiguous stretch of memory, and one transfer.

    Args:
        columns: number of columns per tensor, by the model's names for them.
        dtype: their common dtype.
    """

    def __init__(self, columns: Mapping[str, int], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.segments: list[Segment] = []
        start = 0
        for key in sorted(columns):
            self.segments.append(Segment(key, start, start + columns[key]))
            start += columns[key]
        self.width = start

    @classmethod
    def of(cls, tensors: Mapping[str, torch.Tensor]) -> HopLayout:
        """The layout for tensors of shape [tokens, columns].

        Raises:
            ValueError: a tensor has another rank, or the dtypes differ.
        """
        dtypes = {tensor.dtype for tensor in tensors.values()}
        if len(dtypes) != 1 or any(tensor.dim() != 2 for tensor in tensors.values()):
            shapes = {key: (tuple(tensor.shape), str(tensor.dtype)) for key, tensor in tensors.items()}
            raise ValueError(
                f"a hop carries [tokens, columns] tensors of one dtype between stages, the model has {shapes}"
            )
        return cls({key: tensor.shape[1] for key, tensor in tensors.items()}, dtypes.pop())

    def new_buffer(self, rows: int, device: torch.device) -> torch.Tensor:
        """A zeroed buffer [rows, width]. Zeroed, since rows beyond a round's own are read as padding."""
        return torch.zeros(rows, self.width, dtype=self.dtype, device=device)

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors inside a buffer, by name."""
        return {segment.key: buffer[:, segment.start : segment.stop] for segment in self.segments}


class _Buffers:
    """Buffers of one size, used in turns, and the views of them that the last rounds used."""

    def __init__(self, layout: HopLayout, rows: int, count: int, device: torch.device) -> None:
        self.rows = rows
        self._layout = layout
        self._buffers = [layout.new_buffer(rows, device) for _ in range(count)]
        self._handles: list[Handle | None] = [None] * count
        self._views: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = [
            (buffer[:0], layout.views(buffer[:0])) for buffer in self._buffers
        ]
        self._index = 0

    def next(self, num_tokens: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The first `num_tokens` rows of the next buffer, whole and by tensor, free to be overwritten."""
        self._index = (self._index + 1) % len(self._buffers)
        handle = self._handles[self._index]
        if handle is not None:
            # Orders the overwrite after the send; the stream waits, not the host, where there is a stream.
            handle.wait()
        if self._views[self._index][0].shape[0] != num_tokens:
            buffer = self._buffers[self._index][:num_tokens]
            self._views[self._index] = (buffer, self._layout.views(buffer))
        return self._views[self._index]

    def sent(self, handle: Handle) -> None:
        """What `next` gave is under way."""
        self._handles[self._index] = handle


class HopSender:
    """Sends a stage's hidden states from buffers of its own, so that the next forward need not wait for the peer.

    Args:
        max_tokens: rows of a buffer, the most that a round may have.
        buffers: how many such rounds may be on their way at once.
        few_tokens: most rows of a round that only decodes; more such rounds may be on their way.
        small_buffers: how many of those.
    """

    def __init__(
        self,
        peer: Link,
        layout: HopLayout,
        max_tokens: int,
        device: torch.device,
        buffers: int,
        few_tokens: int = 0,
        small_buffers: int = 0,
    ) -> None:
        self._peer = peer
        self._keys = {segment.key for segment in layout.segments}
        self._large = _Buffers(layout, max_tokens, buffers, device)
        self._small = self._large
        if 0 < few_tokens < max_tokens and small_buffers > buffers:
            self._small = _Buffers(layout, few_tokens, small_buffers, device)

    def send(self, number: int, tensors: Mapping[str, torch.Tensor], num_tokens: int) -> None:
        """Send the first `num_tokens` rows of each tensor as round `number`'s hop."""
        assert tensors.keys() == self._keys, (
            f"round {number}: the model gave {sorted(tensors)}, the next stage expects {sorted(self._keys)}"
        )
        buffers = self._small if num_tokens <= self._small.rows else self._large
        buffer, views = buffers.next(num_tokens)
        for key, view in views.items():
            tensor = tensors[key]
            view.copy_(tensor if tensor.shape[0] == num_tokens else tensor[:num_tokens])
        buffers.sent(self._peer.send(buffer, f"round {number}, hop"))


class HopReceiver:
    """Receives the previous stage's hidden states.

    One buffer is enough: a receive starts after the work already queued on the
    stream, and that includes the copy out of the buffer by the round before.
    """

    def __init__(self, peer: Link, layout: HopLayout, max_tokens: int, device: torch.device) -> None:
        self._peer = peer
        self._buffer = layout.new_buffer(max_tokens, device)
        self._views = layout.views(self._buffer)

    def post(self, number: int, num_tokens: int) -> tuple[dict[str, torch.Tensor], Handle]:
        """Post the receive of round `number`.

        Returns:
            The tensors [max_tokens, columns], whose first `num_tokens` rows are
            there once the receive has been waited for, and the receive.
        """
        pending = self._peer.post_receive(self._buffer[:num_tokens], f"round {number}, hop")
        return dict(self._views), pending
