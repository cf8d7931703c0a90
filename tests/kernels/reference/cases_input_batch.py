"""The kernels that build a round's inputs and book its results."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_comparison import CPU, Results, compare, distinct, floats, ints, prefix_sums
from vllm.v1.worker.gpu import input_batch

MAX_REQS, MAX_TOKENS, MAX_LEN, VOCAB = 12, 64, 40, 50

# Tokens of each row: none, decodes only, prefills only, a mix with a row that has no tokens.
BATCHES = [[], [1], [1] * 8, [5, 1, 7], [1, 0, 9, 1, 3, 0]]
batches = pytest.mark.parametrize("lengths", BATCHES, ids=str)


@batches
@pytest.mark.parametrize("num_lookahead", [1, 3])
def test_prepare_prefill_inputs(lengths: list[int], num_lookahead: int) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        input_ids = ints(rng, 0, VOCAB, MAX_TOKENS)
        next_tokens = ints(rng, 0, VOCAB, num_lookahead, MAX_REQS)
        num_computed = ints(rng, 0, 16, MAX_REQS)
        prefill_len = num_computed + ints(rng, -3, 14, MAX_REQS)
        input_batch.prepare_prefill_inputs(
            input_ids,
            next_tokens,
            distinct(rng, len(lengths), MAX_REQS),
            prefix_sums(lengths, MAX_REQS + 1),
            ints(rng, 0, VOCAB, MAX_REQS, MAX_LEN),
            prefill_len,
            num_computed,
        )
        return {"input_ids": input_ids, "next_tokens": next_tokens}

    for seed in range(4):
        if lengths:
            compare(scenario, "input_batch._prepare_prefill_inputs_kernel", seed=seed)
        else:
            scenario(np.random.default_rng(seed))


@batches
def test_prepare_pos_seq_lens(lengths: list[int]) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        pos, seq_lens = ints(rng, 0, 9, MAX_TOKENS, dtype=torch.int64), ints(rng, 0, 9, MAX_REQS)
        input_batch.prepare_pos_seq_lens(
            distinct(rng, len(lengths), MAX_REQS),
            prefix_sums(lengths, MAX_REQS + 1),
            ints(rng, 0, 3000, MAX_REQS),
            pos,
            seq_lens,
        )
        return {"pos": pos, "seq_lens": seq_lens}

    compare(scenario, "input_batch._prepare_pos_seq_lens_kernel")


@pytest.mark.parametrize("num_new", [0, 1])
@pytest.mark.parametrize("drafts", [[0], [0] * 7, [0, 2, 3, 0, 1]], ids=str)
def test_combine_sampled_and_draft_tokens(drafts: list[int], num_new: int) -> None:
    num_logits = [count + num_new for count in drafts]

    def scenario(rng: np.random.Generator) -> Results:
        lengths = [count + int(rng.integers(1, 5)) * int(rng.integers(0, 2)) for count in num_logits]
        lengths = [max(length, 1) for length in lengths]
        input_ids, seq_lens = ints(rng, 0, VOCAB, MAX_TOKENS), ints(rng, 6, 20, MAX_REQS)
        # About as many rows still in their prompt as past it.
        prefill_len = ints(rng, 4, 22, MAX_REQS)
        logits_indices = input_batch.combine_sampled_and_draft_tokens(
            input_ids,
            distinct(rng, len(drafts), MAX_REQS),
            ints(rng, 0, VOCAB, MAX_REQS, 1, dtype=torch.int64),
            prefix_sums(lengths, MAX_REQS + 1),
            seq_lens,
            prefill_len,
            ints(rng, 0, VOCAB, MAX_REQS, 3, dtype=torch.int64),
            prefix_sums(num_logits),
            sum(num_logits),
            num_new,
        )
        return {"input_ids": input_ids, "logits_indices": logits_indices}

    for seed in range(6):
        compare(scenario, "input_batch._combine_sampled_and_draft_tokens_kernel", seed=seed)


@pytest.mark.parametrize("num_reqs", [1, 9])
def test_get_num_sampled_and_rejected(num_reqs: int) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        num_sampled, num_rejected = input_batch.get_num_sampled_and_rejected(
            ints(rng, 1, 4, num_reqs),
            ints(rng, 5, 9, MAX_REQS),
            prefix_sums([3] * num_reqs),
            distinct(rng, num_reqs, MAX_REQS),
            ints(rng, 5, 9, MAX_REQS),
        )
        return {"num_sampled": num_sampled, "num_rejected": num_rejected}

    compare(scenario, "input_batch._get_num_sampled_and_rejected_kernel")


@pytest.mark.parametrize("with_bin_counts", [False, True])
@pytest.mark.parametrize("with_query", [False, True])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("skipped", ["none", "some", "all"])
def test_post_update(width: int, with_query: bool, with_bin_counts: bool, skipped: str) -> None:
    num_reqs = 7

    def scenario(rng: np.random.Generator) -> Results:
        idx_mapping = distinct(rng, num_reqs, MAX_REQS)
        if skipped != "none":
            idx_mapping[:: 2 if skipped == "some" else 1] = -1
        num_computed, total_len = ints(rng, 5, 9, MAX_REQS), ints(rng, 5, 20, MAX_REQS)
        last_sampled = ints(rng, 0, VOCAB, MAX_REQS, 1, dtype=torch.int64)
        all_token_ids = ints(rng, 0, VOCAB, MAX_REQS, MAX_LEN)
        bin_counts = ints(rng, 0, 3, MAX_REQS, VOCAB) if with_bin_counts else None
        input_batch.post_update(
            idx_mapping,
            num_computed,
            last_sampled,
            bin_counts,
            ints(rng, 0, VOCAB, num_reqs, width, dtype=torch.int64),
            ints(rng, 0, width + 1, num_reqs),
            ints(rng, 0, 2, num_reqs),
            prefix_sums([4, 1, 1, 3, 1, 2, 1]) if with_query else None,
            all_token_ids,
            total_len,
        )
        results = {"num_computed": num_computed, "total_len": total_len, "last": last_sampled, "all": all_token_ids}
        return results if bin_counts is None else results | {"bin_counts": bin_counts}

    for seed in range(2):
        compare(scenario, "input_batch._post_update_kernel", seed=seed)


@pytest.mark.parametrize("lengths", BATCHES[1:], ids=str)
def test_post_update_num_computed_tokens(lengths: list[int]) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        num_computed = ints(rng, 0, 99, MAX_REQS)
        input_batch.post_update_num_computed_tokens(
            distinct(rng, len(lengths), MAX_REQS), num_computed, prefix_sums(lengths, MAX_REQS + 1)
        )
        return {"num_computed": num_computed}

    compare(scenario, "input_batch._post_update_num_computed_tokens_kernel")


@pytest.mark.parametrize("num_logits", [[1], [1] * 6, [3, 1, 4, 2]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_expand_idx_mapping(num_logits: list[int], dtype: torch.dtype) -> None:
    def scenario(rng: np.random.Generator) -> Results:
        idx_mapping = distinct(rng, len(num_logits), MAX_REQS).to(dtype)
        expanded, local_pos = input_batch.expand_idx_mapping(idx_mapping, sum(num_logits), prefix_sums(num_logits), 4)
        return {"expanded": expanded, "local_pos": local_pos}

    compare(scenario, "input_batch._expand_idx_mapping_kernel")


def test_staged_writes() -> None:
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

    def scenario(rng: np.random.Generator) -> Results:
        results: Results = {}
        for dtype in (torch.int32, torch.int64, torch.float32):
            vector = StagedWriteTensor(MAX_REQS, dtype, CPU)
            table = StagedWriteTensor((MAX_REQS, 2048), dtype, CPU, uva_instead_of_gpu=dtype == torch.int32)
            for _ in range(3):
                for req in rng.permutation(MAX_REQS)[:5].tolist():
                    vector.stage_write_elem(req, int(rng.integers(0, 99)))
                    length = int(rng.choice([1, 2, 9, 1500]))
                    table.stage_write(req, int(rng.integers(0, 500)), rng.integers(0, 99, length).tolist())
                vector.apply_write()
                table.apply_write()
            table.stage_write_elem(3, 7)
            table.apply_write()
            results |= {f"vector {dtype}": vector.gpu.clone(), f"table {dtype}": table.gpu.clone()}
        return results

    compare(scenario, "buffer_utils._apply_write_kernel")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompt_embeds(dtype: torch.dtype) -> None:
    from vllm.v1.worker.gpu.model_states.prompt_embeds import PromptEmbedsState

    hidden_size, lengths = 10, [5, 1, 20, 3]

    def scenario(rng: np.random.Generator) -> Results:
        state = PromptEmbedsState(MAX_REQS, hidden_size, dtype, CPU)
        for req in range(0, MAX_REQS, 2):
            embeds = floats(rng, int(rng.integers(1, 40)), hidden_size).to(dtype)
            is_token_ids = ints(rng, 0, 2, embeds.shape[0]).bool() if req % 4 else None
            request = SimpleNamespace(req_id=str(req), prompt_embeds=embeds, prompt_is_token_ids=is_token_ids)
            state.add_request(req, request)
        state.apply_staged_writes()
        # Rows are wider than what is copied into them.
        inputs_embeds = floats(rng, MAX_TOKENS, hidden_size + 2).to(dtype)
        batch = SimpleNamespace(
            num_reqs=len(lengths),
            num_scheduled_tokens=np.array(lengths),
            idx_mapping=distinct(rng, len(lengths), MAX_REQS),
            query_start_loc=prefix_sums(lengths, MAX_REQS + 1),
        )
        state.apply(batch, ints(rng, 0, 12, MAX_REQS), inputs_embeds)
        return {"inputs_embeds": inputs_embeds}

    for seed in range(4):
        compare(scenario, "model_states.prompt_embeds._apply_prompt_embeds_kernel", seed=seed)


@pytest.mark.parametrize("num_dims", [3, 4])
@batches
def test_prepare_rope_positions(lengths: list[int], num_dims: int) -> None:
    from vllm.v1.worker.gpu.mm.rope import RopeState

    def scenario(rng: np.random.Generator) -> Results:
        state = RopeState(num_dims, MAX_REQS, MAX_TOKENS, MAX_LEN, CPU)
        for req in range(MAX_REQS):
            table = ints(rng, 0, 99, num_dims, MAX_LEN)
            model = SimpleNamespace(get_mrope_input_positions=lambda *_, table=table: (table, int(rng.integers(-9, 9))))
            state.init_prefill_positions(req, model, [], [])
        state.apply_staged_writes()
        num_computed = ints(rng, 0, MAX_LEN - 8, MAX_REQS)
        state.prepare_positions(
            distinct(rng, len(lengths), MAX_REQS),
            prefix_sums(lengths, MAX_REQS + 1),
            # Rows in their prompts, at its end and behind it.
            num_computed + ints(rng, -3, 4, MAX_REQS),
            num_computed,
        )
        return {"positions": state.positions}

    for seed in range(4):
        if lengths:
            compare(scenario, "mm.rope._prepare_rope_positions_kernel", seed=seed)
        else:
            scenario(np.random.default_rng(seed))
