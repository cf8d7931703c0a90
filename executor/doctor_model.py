"""What `vllm-handoff doctor` looks at in a model: how its layers are split over the stages."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_handoff.executor.doctor_system import Check

_PARTITION = "VLLM_PP_LAYER_PARTITION"


def checks(model: Path, stages: int) -> Iterator[Check]:
    """The split that vLLM will make, and whether it is even."""
    path = model / "config.json" if model.is_dir() else model
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        yield Check("model", "fail", f"{path} cannot be read ({error})", "give a folder with config.json to --model.")
        return
    # Models with several parts keep the language model's numbers one level down.
    layers = config.get("num_hidden_layers") or config.get("text_config", {}).get("num_hidden_layers")
    if not isinstance(layers, int):
        yield Check("model", "note", f"{path} does not say num_hidden_layers", "its split cannot be foretold.")
        return
    yield layer_split(layers, stages, os.environ.get(_PARTITION))


def layer_split(layers: int, stages: int, partition: str | None) -> Check:
    """How `layers` are split over `stages`, by vLLM's rule or by `partition`."""
    if partition is not None:
        try:
            split = [int(part) for part in partition.split(",")]
        except ValueError:
            split = []
        if len(split) != stages or sum(split) != layers:
            remedy = f"{stages} numbers with the sum {layers}, separated by commas; or unset it."
            return Check("layer split", "fail", f"{_PARTITION}={partition} does not fit", remedy)
    else:
        if stages > layers:
            remedy = f"--pipeline-parallel-size {layers} at most."
            return Check("layer split", "fail", f"{layers} layers for {stages} stages", remedy)
        split = _even_split(layers, stages)
    found = f"{layers} layers as {' + '.join(map(str, split))}"
    if max(split) - min(split) > 0:
        share = 1 - min(split) / max(split)
        remedy = (
            f"The smallest stage idles {share:.0%} of the time, if layers cost the same. {_PARTITION}=N,M,... changes "
            "the split; `vllm-handoff plan` says which one is best."
        )
        return Check("layer split", "note", found, remedy)
    return Check("layer split", "ok", found)


def _even_split(layers: int, stages: int) -> list[int]:
    # vLLM asked directly would import torch; that both agree is a test.
    each, rest = divmod(layers, stages)
    split = [each] * stages
    for index in range(rest):
        # What does not divide goes to the stages before the last, backwards: the last has the sampler to run.
        split[-2 - index] += 1
    return split
