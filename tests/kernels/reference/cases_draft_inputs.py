"""The kernels that feed autoregressive draft models."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_comparison import Results, compare, distinct, floats, ints, prefix_sums
from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator as standalone
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import speculator as dependent

MAX_REQS, MAX_TOKENS, MAX_LEN, VOCAB = 9, 64, 48, 50
DEPENDENT = "spec_decode.target_dependent_ar.speculator"
INT64 = torch.int64

# Tokens of each row: one row; decodes alone; prefills and drafts; a full batch, which leaves no padding.
BATCHES = [[1], [7], [1] * 5, [3, 1, 9, 4], [2] * MAX_REQS]
batches = pytest.mark.parametrize("lengths", BATCHES, ids=str)


def _buffers(rng: np.random.Generator) -> SimpleNamespace:
    """A drafter's input buffers, with leftovers: positions up to the model's length and lengths up to it."""
    return SimpleNamespace(
        input_ids=ints(rng, 0, VOCAB, MAX_TOKENS),
        positions=ints(rng, MAX_LEN - 9, MAX_LEN, MAX_TOKENS, dtype=INT64),
        query_start_loc=ints(rng, 0, 9, MAX_REQS + 1),
        seq_lens=ints(rng, MAX_LEN - 3, MAX_LEN + 1, MAX_REQS),
    )


def _batch(rng: np.random.Generator, lengths: list[int], max_tokens: int = MAX_TOKENS) -> SimpleNamespace:
    """The target's inputs, rows and counters."""
    query_start_loc = prefix_sums(lengths)
    return SimpleNamespace(
        num_reqs=len(lengths),
        num_tokens=sum(lengths),
        idx_mapping=distinct(rng, len(lengths), MAX_REQS),
        query_start_loc=query_start_loc,
        query_start_loc_np=query_start_loc.numpy(),
        input_ids=ints(rng, 0, VOCAB, max_tokens),
        positions=ints(rng, MAX_LEN - 12, MAX_LEN, max_tokens, dtype=INT64),
        seq_lens=ints(rng, MAX_LEN - 12, MAX_LEN + 1, len(lengths)),
    )


def _rejected(rng: np.random.Generator, lengths: list[int]) -> torch.Tensor:
    """Fewer than each row's tokens: the first one is never a draft."""
    return torch.tensor([int(rng.integers(0, length)) for length in lengths], dtype=torch.int32)


def _written(buffers: SimpleNamespace) -> Results:
    return dict(vars(buffers))


@batches
@pytest.mark.parametrize("num_lookahead", [1, 2])
def test_first_step(lengths: list[int], num_lookahead: int) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        buffers, batch = _buffers(rng), _batch(rng, lengths)
        last_token_indices, step = ints(rng, 0, 9, MAX_REQS, dtype=INT64), torch.tensor(2)
        dependent.prepare_prefill_inputs(
            last_token_indices,
            step,
            buffers,
            batch,
            ints(rng, 0, 3, len(lengths)),
            _rejected(rng, lengths),
            ints(rng, 0, VOCAB, MAX_REQS, 1, dtype=INT64),
            ints(rng, 0, VOCAB, num_lookahead, MAX_REQS),
            MAX_REQS,
        )
        return _written(buffers) | {"last_token_indices": last_token_indices, "step": step}

    for seed in range(4):
        compare(scenario, f"{DEPENDENT}._prepare_prefill_inputs_kernel", seed=seed)


def test_first_step_of_a_long_row() -> None:
    """Longer than one block of the kernel, with the buffers for it."""
    lengths = [1500, 2]

    def scenario(rng: np.random.Generator) -> Results:
        buffers, batch = _buffers(rng), _batch(rng, lengths, 2000)
        buffers.input_ids, buffers.positions = ints(rng, 0, VOCAB, 2000), ints(rng, 0, 99, 2000, dtype=INT64)
        last_token_indices = ints(rng, 0, 9, MAX_REQS, dtype=INT64)
        dependent.prepare_prefill_inputs(
            last_token_indices,
            torch.tensor(0),
            buffers,
            batch,
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([0, 1], dtype=torch.int32),
            ints(rng, 0, VOCAB, MAX_REQS, 1, dtype=INT64),
            ints(rng, 0, VOCAB, 1, MAX_REQS),
            MAX_REQS,
        )
        return _written(buffers) | {"last_token_indices": last_token_indices}

    compare(scenario, f"{DEPENDENT}._prepare_prefill_inputs_kernel")


@pytest.mark.parametrize("num_reqs", [1, 4, MAX_REQS])
@pytest.mark.parametrize("advance", [False, True])
def test_second_step(num_reqs: int, advance: bool) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        buffers, sample_positions = _buffers(rng), ints(rng, 0, 99, MAX_REQS, dtype=INT64)
        # A column, as the runner gives it: its values do not stand next to each other.
        draft_tokens = ints(rng, 0, VOCAB, MAX_REQS, 3, dtype=INT64)
        dependent.prepare_decode_inputs(
            draft_tokens[:num_reqs, 0],
            ints(rng, MAX_LEN - 3, MAX_LEN + 1, MAX_REQS),
            ints(rng, 0, 2, num_reqs),
            buffers,
            sample_positions,
            MAX_LEN,
            MAX_REQS,
            advance_draft_positions=advance,
        )
        return _written(buffers) | {"sample_positions": sample_positions}

    for seed in range(3):
        compare(scenario, f"{DEPENDENT}._prepare_decode_inputs_kernel", seed=seed)


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("advance", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_further_steps(step: int, advance: bool, dtype: torch.dtype) -> None:
    """Of four drafts, or of three where fewer are asked for than there is room for; step 3 is the last in both."""
    num_reqs, hidden_size = 4, 12

    def scenario(rng: np.random.Generator) -> Results:
        results: Results = {}
        for num_steps in (3, 4):
            buffers, sample_positions = _buffers(rng), ints(rng, 0, 99, MAX_REQS, dtype=INT64)
            # The model's output has padding rows, and its input buffer may be wider.
            hidden_states = floats(rng, num_reqs + 2, hidden_size).to(dtype)
            next_hidden_states = floats(rng, MAX_TOKENS, hidden_size + 1).to(dtype)
            output = ints(rng, 0, VOCAB, MAX_REQS, 4, dtype=INT64)
            dependent.update_draft_inputs(
                ints(rng, 0, VOCAB, num_reqs, dtype=INT64),
                torch.tensor(step),
                hidden_states,
                output,
                next_hidden_states,
                buffers,
                sample_positions,
                num_reqs,
                MAX_LEN,
                num_steps,
                advance_draft_positions=advance,
            )
            written = _written(buffers) | {"sample_positions": sample_positions, "output": output}
            written["hidden_states"] = next_hidden_states
            results |= {f"{name} of {num_steps}": value for name, value in written.items()}
        return results

    compare(scenario, f"{DEPENDENT}._update_draft_inputs_kernel")


@pytest.mark.parametrize("lengths", [*BATCHES, [600, 3]], ids=str)
def test_standalone_model(lengths: list[int]) -> None:
    max_tokens = max(MAX_TOKENS, sum(lengths))

    def scenario(rng: np.random.Generator) -> Results:
        buffers, batch = _buffers(rng), _batch(rng, lengths, max_tokens)
        expanded_ids = ints(rng, 0, VOCAB, max_tokens + MAX_REQS)
        expanded_positions = ints(rng, 0, VOCAB, max_tokens + MAX_REQS, dtype=INT64)
        last_token_indices = ints(rng, 0, 9, MAX_REQS, dtype=INT64)
        num_expanded = standalone.prepare_prefill_inputs(
            buffers,
            batch,
            ints(rng, 0, VOCAB, MAX_REQS, 1, dtype=INT64),
            _rejected(rng, lengths),
            expanded_ids,
            expanded_positions,
            last_token_indices,
            MAX_REQS,
            MAX_LEN,
        )
        assert num_expanded == sum(lengths) + len(lengths)
        expanded = {"expanded_ids": expanded_ids, "expanded_positions": expanded_positions}
        return _written(buffers) | expanded | {"last_token_indices": last_token_indices}

    for seed in range(4):
        compare(scenario, "spec_decode.standalone_ar.speculator._prepare_prefill_inputs_kernel", seed=seed)
