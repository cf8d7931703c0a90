"""How long a stage takes for a round, from the model's shape and a few constants of the device.

A round reads the weights of the stage's layers once, whatever it holds, and
multiplies every token with them; attention also reads the keys and values of
the context. The last stage adds the head and the sampler, for sampled rows
alone. All of it is linear, so a stage is a handful of coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_handoff.scheduler_ext.model_shape import LayerShape, ModelShape


@dataclass(frozen=True)
class Device:
    """What one device achieves in practice, not what its data sheet says.

    Attributes:
        bandwidth: bytes a second in which weights are read.
        kv_bandwidth: bytes a second in which decoding reads keys and values.
        decode_flops: floating-point operations a second of a decoding row.
        prefill_flops: the same for prompt tokens.
        layer_seconds: of every layer and round beside that: kernels that are too small to count, and their gaps.
        stage_seconds: of every stage and round: preparing inputs, and what surrounds the layers.
        sampler_passes: how often the sampler reads or writes a row of logits (4 bytes a token of the vocabulary).
    """

    bandwidth: float
    kv_bandwidth: float
    decode_flops: float
    prefill_flops: float
    layer_seconds: float
    stage_seconds: float
    sampler_passes: float


# Fitted by `vllm-handoff simulate --fit` to runs of an 8B Llama on H200s (simulator/measured.json): a test compares.
# That decode_flops is above what the device can do says that a decoding row's arithmetic partly hides behind the
# reading of weights, which this linear model adds up.
H200 = Device(
    bandwidth=4.252e12,
    kv_bandwidth=4.169e12,
    decode_flops=1.136e15,
    prefill_flops=6.319e14,
    layer_seconds=4.554e-5,
    stage_seconds=9.723e-5,
    sampler_passes=4.904,
)


@dataclass(frozen=True)
class RoundWork:
    """What one round holds.

    Attributes:
        rows: decoding requests, one token each.
        prompt_tokens: tokens of prefill chunks.
        samples: rows that are sampled: decoding rows and final chunks.
        context: tokens of context that decoding rows attend to, summed over the rows.
        prompt_context: the same for prompt tokens.
    """

    rows: float = 0
    prompt_tokens: float = 0
    samples: float = 0
    context: float = 0
    prompt_context: float = 0

    @classmethod
    def decode(cls, rows: float, context: float) -> RoundWork:
        """A round of `rows` decoding requests with `context` tokens of context each."""
        return cls(rows=rows, samples=rows, context=rows * context)


class StageCost:
    """One stage's time for a round.

    Args:
        model: the whole model.
        layers: this stage's layers.
        first, last: whether it owns the embedding, and the head and the sampler.
        device: what runs it.
        ranks: tensor-parallel ranks that share the stage. What they add by talking to each other is not counted.
    """

    def __init__(
        self,
        model: ModelShape,
        layers: Sequence[LayerShape],
        device: Device,
        *,
        first: bool,
        last: bool,
        ranks: int = 1,
    ) -> None:
        self._model, self._device, self._ranks = model, device, ranks
        self._sparse = [layer for layer in layers if layer.experts]
        used = sum(layer.used for layer in layers) / ranks
        always = sum(layer.always for layer in layers) * model.weight_bytes / ranks
        count = len(layers)
        self.base = device.stage_seconds + count * device.layer_seconds + always / device.bandwidth
        self.per_row = 2 * used / device.decode_flops
        self.per_prompt_token = 2 * used / device.prefill_flops
        self.per_context = count * model.kv_width * 2 / ranks / device.kv_bandwidth
        self.per_prompt_context = count * 4 * model.attention_width / ranks / device.prefill_flops
        self.head = self.per_sample = 0.0
        if last:
            self.head = model.head * model.head_bytes / ranks / device.bandwidth
            logits = device.sampler_passes * model.vocab * 4 / device.bandwidth
            self.per_sample = 2 * model.head / ranks / device.decode_flops + logits
        if first:  # the embedding: one row of it read, one row of hidden states written, for every token
            embedding = 2 * model.hidden * model.head_bytes / device.bandwidth
            self.per_row += embedding
            self.per_prompt_token += embedding

    def seconds(self, work: RoundWork) -> float:
        """Time of one round."""
        total = (
            self.base
            + self.per_row * work.rows
            + self.per_prompt_token * work.prompt_tokens
            + self.per_context * work.context
            + self.per_prompt_context * work.prompt_context
        )
        if work.samples:
            total += self.head + self.per_sample * work.samples
        if self._sparse:
            tokens = work.rows + work.prompt_tokens
            experts = sum(layer.read(tokens) - layer.always for layer in self._sparse)
            total += experts * self._model.weight_bytes / self._ranks / self._device.bandwidth
        return total


def stage_costs(model: ModelShape, split: Sequence[int], device: Device = H200, ranks: int = 1) -> list[StageCost]:
    """The stages of a pipeline that holds `split[s]` layers on stage s.

    Raises:
        ValueError: the split does not add up to the model's layers.
    """
    if sum(split) != len(model.layers):
        raise ValueError(f"the split {','.join(map(str, split))} is not of {len(model.layers)} layers")
    stages, begin = [], 0
    for index, count in enumerate(split):
        layers = model.layers[begin : begin + count]
        stages.append(StageCost(model, layers, device, first=index == 0, last=index == len(split) - 1, ranks=ranks))
        begin += count
    return stages
