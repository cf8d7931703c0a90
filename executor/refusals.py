"""What this release cannot run right yet: the one list of refusals, each with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class UnsupportedFeatureError(ValueError):
    """A configuration that this release would run wrongly, or was never seen to run right."""


class Refusal(NamedTuple):
    """One refused configuration: a sentence for it, when it applies, and what to do instead."""

    what: str
    applies: Callable[[Any], bool]
    remedy: str


def _model(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda config: config.model_config is not None and test(config.model_config)


# Refused with any number of stages.
ALWAYS = (
    Refusal(
        "the V1 model runner",
        lambda c: not c.use_v2_model_runner,
        "unset VLLM_USE_V2_MODEL_RUNNER and drop the options that vLLM names as unsupported by its V2 runner",
    ),
    Refusal(
        "more than one node",
        lambda c: c.parallel_config.nnodes > 1,
        "use --distributed-executor-backend mp",
    ),
    # Of other models every replica is an engine of its own; here their rounds are tied to each other.
    Refusal(
        "data parallelism of mixture-of-experts models",
        lambda c: c.parallel_config.data_parallel_size > 1 and (c.model_config is None or c.model_config.is_moe),
        "start one server per replica, or use --distributed-executor-backend mp",
    ),
    Refusal(
        "context parallelism",
        lambda c: (
            c.parallel_config.prefill_context_parallel_size > 1 or c.parallel_config.decode_context_parallel_size > 1
        ),
        "set the context-parallel sizes to 1, or use --distributed-executor-backend mp",
    ),
)

# Refused with more than one stage.
WITH_STAGES = (
    Refusal(
        "speculative decoding by this method with pipeline parallelism",
        lambda c: c.speculative_config is not None and not _tested(c.speculative_config),
        "use ngram_gpu, eagle, eagle3, mtp or draft_model",
    ),
    # vLLM 0.32's synchronous scheduler gives wrong tokens there: with a request's round in flight it takes the drafts
    # of another round for tokens that it may schedule.
    Refusal(
        "speculative decoding with pipeline parallelism and synchronous scheduling",
        lambda c: c.speculative_config is not None and not c.scheduler_config.async_scheduling,
        'drop --no-async-scheduling; for n-grams choose the method "ngram_gpu"',
    ),
    Refusal(
        "speculative decoding of models with recurrent state (hybrid, Mamba) with pipeline parallelism",
        lambda c: (
            c.speculative_config is not None
            and c.model_config is not None
            and (c.model_config.is_hybrid or c.model_config.has_inner_state)
        ),
        "drop --speculative-config, or use --distributed-executor-backend mp",
    ),
    Refusal(
        "pooling models with pipeline parallelism",
        _model(lambda m: m.runner_type == "pooling"),
        "set --pipeline-parallel-size 1",
    ),
    Refusal(
        "encoder-decoder models with pipeline parallelism",
        _model(lambda m: m.is_encoder_decoder),
        "set --pipeline-parallel-size 1",
    ),
    Refusal(
        "diffusion models with pipeline parallelism",
        _model(lambda m: m.is_diffusion),
        "set --pipeline-parallel-size 1",
    ),
    Refusal(
        "KV connectors other than OffloadingConnector with pipeline parallelism",
        lambda c: c.kv_transfer_config is not None and c.kv_transfer_config.kv_connector != "OffloadingConnector",
        "drop --kv-transfer-config, or use --distributed-executor-backend mp",
    ),
    Refusal(
        "encoder-cache connectors with pipeline parallelism",
        lambda c: c.ec_transfer_config is not None,
        "drop --ec-transfer-config, or use --distributed-executor-backend mp",
    ),
)


# Refused on a CPU, where no native version of the kernels exists: they would die in the worker.
ON_A_CPU = (
    Refusal(
        "speculative decoding by this method on a CPU",
        lambda c: c.speculative_config is not None and not _tested(c.speculative_config),
        "use ngram_gpu, eagle, eagle3, mtp or draft_model, or drop --speculative-config",
    ),
    Refusal(
        "pooling models on a CPU",
        _model(lambda m: m.runner_type == "pooling"),
        "use --distributed-executor-backend mp",
    ),
    Refusal(
        "models with recurrent state (hybrid, Mamba) on a CPU",
        _model(lambda m: m.is_hybrid or m.has_inner_state),
        "use --distributed-executor-backend mp",
    ),
    Refusal(
        "watermarking on a CPU",
        lambda c: getattr(c, "watermark_config", None) is not None,
        "drop the watermark configuration",
    ),
    Refusal(
        "batch-sharded sampling on a CPU",
        lambda c: bool(getattr(c.parallel_config, "enable_batch_sharded_sampling", False)),
        "drop --enable-batch-sharded-sampling",
    ),
)


def _on_a_cpu(config: Any) -> bool:
    return bool(config.device_config.device_type == "cpu")


def _tested(speculative: Any) -> bool:
    """Whether this way of speculative decoding was seen to give the right tokens."""
    return (
        speculative.method in ("ngram", "ngram_gpu", "eagle", "eagle3", "mtp", "draft_model")
        and not (speculative.use_gemma4_mtp() or speculative.use_multi_module_mtp())
        and not speculative.enable_adaptive_verification
    )


def check_supported(vllm_config: Any) -> None:
    """Refuse a configuration on the lists above.

    Raises:
        UnsupportedFeatureError: with what is refused and what to do instead.
    """
    stages = vllm_config.parallel_config.pipeline_parallel_size
    for refusal in ALWAYS + (WITH_STAGES if stages > 1 else ()) + (ON_A_CPU if _on_a_cpu(vllm_config) else ()):
        if refusal.applies(vllm_config):
            raise UnsupportedFeatureError(f"vllm-handoff does not run {refusal.what} yet: {refusal.remedy}.")
