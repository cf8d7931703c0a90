"""What a proposer's own model needs on the last of several stages, where vLLM 0.32 does not expect it.

Patches, all of one worker's proposer and for the time of one call; for vLLM 0.32.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from vllm.config import ModelConfig
from vllm.distributed import parallel_state

_PARTITION = "VLLM_PP_LAYER_PARTITION"


class _OneStage:
    """What models ask of their pipeline group, answered by a pipeline of one stage."""

    world_size = 1
    rank_in_group = 0
    is_first_rank = True
    is_last_rank = True


@contextlib.contextmanager
def one_stage() -> Iterator[None]:
    """A draft model is whole on its stage, and no part of the target's pipeline.

    Why: vLLM 0.32 builds and runs a draft model (method `draft_model`) by the
    pipeline group of its rank: the last stage builds a part of it, without an
    embedding, and then waits for hidden states. Can go once vLLM gives it a group of its own.
    """
    before = parallel_state._PP
    parallel_state._PP = _OneStage()  # type: ignore[assignment]
    try:
        yield
    finally:
        parallel_state._PP = before


@contextlib.contextmanager
def all_layers() -> Iterator[None]:
    """The user's division of the target's layers among the stages is none of a draft model's that is whole.

    Why: vLLM 0.32 takes it from the environment whenever a model is built.
    """
    partition = os.environ.pop(_PARTITION, None)
    try:
        with one_stage():
            yield
    finally:
        if partition is not None:
            os.environ[_PARTITION] = partition


@contextlib.contextmanager
def layers_behind_the_whole_target() -> Iterator[None]:
    """The proposer's layers are numbered from the end of the whole target model.

    Why: the EAGLE models of vLLM 0.32 number theirs from how many layers this
    stage has, and so on the last of several stages take names that layers of
    the target have ("Duplicate layer name"). Can go once they ask for the total.
    """
    before = ModelConfig.get_num_layers
    ModelConfig.get_num_layers = lambda config, _: config.get_total_num_hidden_layers()  # type: ignore[method-assign]
    try:
        yield
    finally:
        ModelConfig.get_num_layers = before  # type: ignore[method-assign]


def fit_for_last_stage(speculator: Any, method: str) -> None:
    """Let the proposer's model load and run on the last of several stages. To be called before it is loaded."""
    if method == "draft_model":
        _within(speculator, "load_draft_model", all_layers)
        _within(speculator, "_run_model", one_stage)
    elif method in ("eagle", "eagle3"):
        _within(speculator, "load_draft_model", layers_behind_the_whole_target)


def _within(owner: Any, name: str, context: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Let `owner`'s method run within a context. On the object, so that it shadows the class's."""
    original = getattr(owner, name)

    def method(*args: Any, **kwargs: Any) -> Any:
        with context():
            return original(*args, **kwargs)

    setattr(owner, name, method)
