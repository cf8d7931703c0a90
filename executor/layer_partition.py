"""Applies the layer split that was planned, where the user asked for that and has not chosen a split."""

from __future__ import annotations

import os
from typing import Any

from vllm_handoff.scheduler_ext.layer_split import OperatingPoint, assess, even_split, plan_split
from vllm_handoff.scheduler_ext.model_shape import ModelShape, ModelShapeError
from vllm_handoff.scheduler_ext.settings import HandoffSettings

# vLLM reads it in every process that asks which layers a stage holds: the engine's and the workers'. All of them
# inherit the environment of the process that completes the configuration.
VARIABLE = "VLLM_PP_LAYER_PARTITION"
# What this module put there, so that it is not mistaken for the user's choice by the next engine of the same process.
_OURS = "VLLM_HANDOFF_LAYER_PARTITION"


def apply_layer_split(vllm_config: Any, settings: HandoffSettings) -> str | None:
    """Set VLLM_PP_LAYER_PARTITION for the engine and its workers, if that is asked for and not done by the user.

    Returns:
        The partition that was set, None if it was left to the user or to vLLM.
    """
    from vllm.logger import init_logger

    logger = init_logger(__name__)
    if os.environ.get(VARIABLE) is not None and os.environ.get(VARIABLE) == os.environ.get(_OURS):
        del os.environ[VARIABLE]
    os.environ.pop(_OURS, None)
    stages = vllm_config.parallel_config.pipeline_parallel_size
    if settings.layer_split != "auto" or stages == 1:
        return None
    if VARIABLE in os.environ:
        logger.info("%s=%s is set: layer_split is not used.", VARIABLE, os.environ[VARIABLE])
        return None
    point, ranks = OperatingPoint(), vllm_config.parallel_config.tensor_parallel_size
    try:
        model = ModelShape.of(vllm_config.model_config.hf_text_config.to_dict())
        plan = plan_split(model, stages, point, ranks=ranks)
        even = assess(model, even_split(len(model.layers), stages), point, ranks=ranks)
    except (ModelShapeError, ValueError) as error:
        logger.warning("layer_split is not used, and vLLM splits the layers evenly: %s", error)
        return None
    gain = 100 * (even.slowest / plan.slowest - 1)
    if plan.split == even.split:
        logger.info("layer_split: the even split %s is the best for %s.", plan.partition, point)
        return None
    logger.info(
        "layer_split: %s instead of %s, for %s: the slowest stage is %.1f%% faster. %s set by hand would win.",
        plan.partition, even.partition, point, gain, VARIABLE,
    )  # fmt: skip
    os.environ[VARIABLE] = os.environ[_OURS] = plan.partition
    return plan.partition
