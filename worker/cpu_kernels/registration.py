"""Which kernels have a native version, and how they are put in Triton's place."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

from vllm_handoff.worker.cpu_kernels import (
    block_table,
    block_verification,
    draft_inputs,
    gumbel,
    input_batch,
    kv_cache,
    logit_filters,
    logits_stats,
    logprobs,
    ngram,
    penalties,
    prompt_embeds,
    rejection,
    resampling,
    rope_positions,
    sampler_output,
    staged_writes,
    thinking_budget,
)

NativeKernel = Callable[..., None]

_RUNNER = "vllm.v1.worker.gpu"
_AUTOREGRESSIVE = f"{_RUNNER}.spec_decode.target_dependent_ar.speculator"
_NGRAM = f"{_RUNNER}.spec_decode.ngram.speculator"
_REJECTION = f"{_RUNNER}.spec_decode.rejection_sampler"

# Kernel's qualified name -> native version with the kernel's parameter names.
NATIVE_KERNELS: dict[str, NativeKernel] = {
    f"{_RUNNER}.input_batch._prepare_prefill_inputs_kernel": input_batch.prepare_prefill_inputs,
    f"{_RUNNER}.input_batch._prepare_pos_seq_lens_kernel": input_batch.prepare_pos_seq_lens,
    f"{_RUNNER}.input_batch._combine_sampled_and_draft_tokens_kernel": input_batch.combine_sampled_and_draft_tokens,
    f"{_RUNNER}.input_batch._get_num_sampled_and_rejected_kernel": input_batch.get_num_sampled_and_rejected,
    f"{_RUNNER}.input_batch._post_update_kernel": input_batch.post_update,
    f"{_RUNNER}.input_batch._post_update_num_computed_tokens_kernel": input_batch.post_update_num_computed_tokens,
    f"{_RUNNER}.input_batch._expand_idx_mapping_kernel": input_batch.expand_idx_mapping,
    f"{_RUNNER}.block_table._gather_block_tables_kernel": block_table.gather_block_tables,
    f"{_RUNNER}.block_table._compute_slot_mappings_kernel": block_table.compute_slot_mappings,
    f"{_RUNNER}.cp_utils._dcp_local_seq_lens_kernel": block_table.dcp_local_seq_lens,
    f"{_RUNNER}.buffer_utils._apply_write_kernel": staged_writes.apply_write,
    f"{_RUNNER}.sample.gumbel._temperature_kernel": gumbel.apply_temperature,
    f"{_RUNNER}.sample.gumbel._gumbel_sample_kernel": gumbel.gumbel_sample,
    f"{_RUNNER}.sample.penalties._penalties_kernel": penalties.apply_penalties,
    f"{_RUNNER}.sample.penalties._bincount_kernel": penalties.bincount,
    f"{_RUNNER}.sample.min_p._min_p_kernel": logit_filters.apply_min_p,
    f"{_RUNNER}.sample.logit_bias._bias_kernel": logit_filters.apply_logit_bias,
    f"{_RUNNER}.sample.bad_words._bad_words_kernel": logit_filters.apply_bad_words,
    f"{_RUNNER}.sample.logprob._topk_log_softmax_kernel": logprobs.topk_log_softmax,
    f"{_RUNNER}.sample.logprob._ranks_kernel": logprobs.token_ranks,
    f"{_RUNNER}.sample.logprob._fill_logprob_token_ids_kernel": logprobs.fill_logprob_token_ids,
    f"{_RUNNER}.sample.prompt_logprob._prompt_logprobs_token_ids_kernel": logprobs.prompt_logprobs_token_ids,
    f"{_RUNNER}.sample.thinking_budget._update_committed_marker_cache_kernel": (
        thinking_budget.update_committed_marker_cache
    ),
    f"{_RUNNER}.sample.thinking_budget._thinking_budget_kernel": thinking_budget.force_reasoning_end,
    f"{_RUNNER}.sample.trace_replay._trace_replay_kernel": sampler_output.replay_trace,
    f"{_RUNNER}.sample.output._compact_sampling_mask_kernel": sampler_output.compact_sampling_mask,
    f"{_RUNNER}.structured_outputs._apply_grammar_bitmask_kernel": sampler_output.apply_grammar_bitmask,
    f"{_RUNNER}.metrics.logits._num_nans_kernel": sampler_output.num_nans,
    f"{_RUNNER}.model_states.prompt_embeds._apply_prompt_embeds_kernel": prompt_embeds.apply_prompt_embeds,
    f"{_RUNNER}.mm.rope._prepare_rope_positions_kernel": rope_positions.prepare_rope_positions,
    f"{_AUTOREGRESSIVE}._prepare_prefill_inputs_kernel": draft_inputs.prepare_draft_prefill,
    f"{_AUTOREGRESSIVE}._prepare_decode_inputs_kernel": draft_inputs.prepare_draft_decode,
    f"{_AUTOREGRESSIVE}._update_draft_inputs_kernel": draft_inputs.update_draft_inputs,
    f"{_RUNNER}.spec_decode.standalone_ar.speculator._prepare_prefill_inputs_kernel": (
        draft_inputs.prepare_standalone_prefill
    ),
    f"{_NGRAM}._ngram_scan_kernel": ngram.scan_for_matches,
    f"{_NGRAM}._ngram_finalize_kernel": ngram.propose_drafts,
    f"{_REJECTION}._flatten_sampled_kernel": rejection.flatten_sampled,
    f"{_REJECTION}._gather_draft_sampled_kernel": rejection.gather_draft_sampled,
    f"{_REJECTION}_utils._compute_local_logits_stats_kernel": logits_stats.compute_local_logits_stats,
    f"{_REJECTION}_utils._compute_cumulative_log_p_kernel": block_verification.compute_cumulative_log_p,
    f"{_REJECTION}_utils._compute_local_residual_mass_kernel": block_verification.compute_local_residual_mass,
    f"{_REJECTION}_utils._rejection_kernel": rejection.verify_drafts,
    f"{_REJECTION}_utils._resample_kernel": resampling.resample,
    f"{_REJECTION}_utils._insert_resampled_kernel": resampling.insert_resampled,
    "vllm.v1.worker.utils._zero_kv_blocks_kernel": kv_cache.zero_kv_blocks,
}

# Native versions whose first parameter is the launch grid: the kernel learns something from it that no argument tells.
GRID_KERNELS = frozenset({f"{_RUNNER}.block_table._gather_block_tables_kernel"})

_registered = False


def register_native_kernels() -> None:
    """See `vllm_handoff.worker.cpu_kernels.register_cpu_kernels`."""
    global _registered
    if _registered:
        return
    from vllm.triton_utils import HAS_TRITON, triton
    from vllm.triton_utils.dispatcher import register_kernels

    if HAS_TRITON:
        raise RuntimeError("The native CPU kernels replace Triton's, but vLLM found a Triton that works here")
    # Launchers call triton.next_power_of_2 on the host, and vLLM 0.32's placeholder for a missing Triton lacks it.
    # To be dropped once vLLM's placeholder has it.
    if not hasattr(triton, "next_power_of_2"):
        from vllm.utils.math_utils import next_power_of_2

        triton.next_power_of_2 = next_power_of_2
    with warnings.catch_warnings():
        # It looks at every attribute of every module loaded, deprecated ones included.
        warnings.simplefilter("ignore", FutureWarning)
        register_kernels(NATIVE_KERNELS)
    for name in GRID_KERNELS:
        _pass_grid(name)
    _allow_ngram_without_triton()
    _registered = True


def _allow_ngram_without_triton() -> None:
    """Let vLLM's n-gram proposer start, whose kernels no longer need Triton.

    The constructor of vLLM 0.32's `NgramGPUSpeculator` refuses to run unless its module's own HAS_TRITON is true, which
    nothing else there reads. To be dropped once vLLM no longer asks, or counts registered kernels.
    """
    sys.modules[_NGRAM].HAS_TRITON = True  # type: ignore[attr-defined]


def _pass_grid(name: str) -> None:
    """Make launches of a registered kernel hand their grid to the native version, which vLLM's wrapper drops.

    To be dropped once vLLM's `KernelOverride` passes the grid on.
    """
    from vllm.triton_utils.dispatcher import KernelOverride

    class GridKernelOverride(KernelOverride):
        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            def launch(*args: Any, **kwargs: Any) -> Any:
                return self._impl(grid, *args, **kwargs)

            return launch

    module_name, attribute = name.rsplit(".", 1)
    # Changed in place, because other modules may hold the same wrapper by now.
    getattr(sys.modules[module_name], attribute).__class__ = GridKernelOverride
