"""Which stage holds how many layers, so that all stages take equally long."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from vllm_handoff.scheduler_ext.model_shape import ModelShape
from vllm_handoff.scheduler_ext.stage_cost import H200, Device, RoundWork, StageCost, stage_costs


@dataclass(frozen=True)
class OperatingPoint:
    """What an average round holds once an engine is busy. The split is chosen for it.

    Attributes:
        rows: decoding requests of one round; with N requests on P stages, N / P.
        prefill_share: prompt tokens as a share of all tokens that the engine works on; 512 + 128 is 0.8.
        context: tokens of context of a decoding request.
    """

    rows: int = 32
    prefill_share: float = 0.5
    context: int = 1024

    def __post_init__(self) -> None:
        if self.rows < 1 or self.context < 1 or not 0 <= self.prefill_share < 1:
            raise ValueError(
                f"an operating point has at least one row and one token of context, and a prefill share from 0 "
                f"to below 1, not {self}"
            )

    @property
    def work(self) -> RoundWork:
        """The average round: the rows, and the prompt tokens that come with so many generated ones."""
        prompt = self.rows * self.prefill_share / (1 - self.prefill_share)
        return RoundWork(
            rows=self.rows,
            prompt_tokens=prompt,
            samples=self.rows,
            context=self.rows * self.context,
            prompt_context=prompt * self.context / 2,
        )


@dataclass(frozen=True)
class Plan:
    """A split and what it means.

    Attributes:
        split: layers of each stage.
        seconds: of each stage, for an average round of the operating point.
    """

    split: tuple[int, ...]
    seconds: tuple[float, ...]

    @property
    def slowest(self) -> float:
        """Seconds of the slowest stage, which sets the pace."""
        return max(self.seconds)

    @property
    def partition(self) -> str:
        """The value of VLLM_PP_LAYER_PARTITION."""
        return ",".join(map(str, self.split))

    @property
    def idle(self) -> float:
        """The share of all stages' time that is spent waiting for the slowest."""
        return 1 - sum(self.seconds) / (len(self.seconds) * self.slowest)


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """As many layers on every stage, what remains on the later ones but the last: what vLLM does by itself."""
    each, remaining = divmod(layers, stages)
    split = [each] * stages
    for index in range(remaining):
        split[-2 - index] += 1
    return tuple(split)


def assess(
    model: ModelShape, split: Sequence[int], point: OperatingPoint, device: Device = H200, ranks: int = 1
) -> Plan:
    """The stage times of a given split.

    Raises:
        ValueError: the split is not of the model's layers.
    """
    costs = stage_costs(model, split, device, ranks)
    return Plan(tuple(split), tuple(cost.seconds(point.work) for cost in costs))


def plan_split(model: ModelShape, stages: int, point: OperatingPoint, device: Device = H200, ranks: int = 1) -> Plan:
    """The split whose slowest stage is fastest; among those, the one nearest to equal stage times.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    work = point.work
    own = [
        StageCost(model, (), device, first=s == 0, last=s == stages - 1, ranks=ranks).seconds(work)
        for s in range(stages)
    ]
    split = _fastest(_layer_seconds(model, point, device, ranks), own)
    return assess(model, split, point, device, ranks)


class RecordedStages:
    """What a recorded run says about layers: for devices, or work, that the constants do not describe.

    The stages before the last hold nothing but layers, so their time is the
    layers'; what the last one takes beyond its layers is the head and the sampler.

    Args:
        model: the model that ran. Its shape says how layers of different kinds compare.
        split: the layers of each stage in that run.
        seconds: mean time of a round's own compute, of each stage.

    Raises:
        ValueError: there are fewer than two stages, or not one time for each.
    """

    def __init__(self, model: ModelShape, split: Sequence[int], seconds: Sequence[float]) -> None:
        if len(split) < 2 or len(split) != len(seconds) or sum(split) != len(model.layers):
            raise ValueError(
                f"a recording of {len(seconds)} stages does not fit the split {','.join(map(str, split))} "
                f"of {len(model.layers)} layers; at least two stages are needed"
            )
        weights = _layer_seconds(model, OperatingPoint(), H200, 1)
        before = len(weights) - split[-1]
        scale = sum(seconds[:-1]) / sum(weights[:before])
        self._layers = [scale * weight for weight in weights]
        self._head = max(0.0, seconds[-1] - sum(self._layers[before:]))

    def assess(self, split: Sequence[int]) -> Plan:
        """The stage times of a split."""
        seconds, begin = [], 0
        for count in split:
            seconds.append(sum(self._layers[begin : begin + count]))
            begin += count
        seconds[-1] += self._head
        return Plan(tuple(split), tuple(seconds))

    def plan(self, stages: int) -> Plan:
        """The split whose slowest stage is fastest.

        Raises:
            ValueError: there are fewer layers than stages.
        """
        return self.assess(_fastest(self._layers, [0.0] * (stages - 1) + [self._head]))


def _layer_seconds(model: ModelShape, point: OperatingPoint, device: Device, ranks: int) -> list[float]:
    """What each layer adds to its stage's time."""
    work = point.work
    bare = StageCost(model, (), device, first=False, last=False, ranks=ranks).seconds(work)
    kinds = {
        kind: StageCost(model, (kind,), device, first=False, last=False, ranks=ranks).seconds(work) - bare
        for kind in set(model.layers)
    }
    return [kinds[layer] for layer in model.layers]


def _fastest(layer_seconds: Sequence[float], own: Sequence[float]) -> tuple[int, ...]:
    """The best split of layers over stages, of which each takes `own` seconds beside its layers.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    layers, stages = len(layer_seconds), len(own)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be split over {stages} stages: each needs at least one")
    until = [0.0, *itertools.accumulate(layer_seconds)]
    # best[n]: over the stages so far, holding the first n layers: (slowest, sum of squares, split).
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        rest = stages - stage - 1
        grown: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for begin, (slowest, squares, split) in best.items():
            ends = range(begin + 1, layers - rest + 1) if rest else (layers,)
            for end in ends:
                seconds = own[stage] + until[end] - until[begin]
                # Rounded, so that equal stages are equal whatever the order of additions.
                candidate = (round(max(slowest, seconds), 9), squares + seconds * seconds, (*split, end - begin))
                if end not in grown or candidate < grown[end]:
                    grown[end] = candidate
        best = grown
    return best[layers][2]
