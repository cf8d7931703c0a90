"""vLLM's own launchers and states, run end to end on the native kernels in a process that has no Triton."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu import input_batch as launchers
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

CPU = torch.device("cpu")
MAX_REQS, MAX_LEN, MAX_TOKENS, VOCAB, BLOCK = 8, 64, 32, 40, 4


class Runner:
    """The model runner's calls in its order, around a model whose next token is the last one plus one."""

    def __init__(self) -> None:
        self.states = RequestState(MAX_REQS, MAX_LEN, MAX_TOKENS, 0, VOCAB, CPU)
        self.buffers = InputBuffers(MAX_REQS, MAX_TOKENS, CPU)
        self.tables = BlockTables([BLOCK], MAX_REQS, MAX_TOKENS, [MAX_LEN // BLOCK], CPU)
        self.sampler = Sampler(SimpleNamespace(reasoning_config=None), MAX_REQS, VOCAB, CPU, self.states)
        # Logits: noise, and how much likelier than it the model's own next token is.
        self.noise, self.confidence = np.random.default_rng(0).standard_normal((MAX_REQS, VOCAB)), 9.0

    def add(self, req_id: str, prompt: list[int], **params: Any) -> None:
        self.states.add_request(req_id, len(prompt), prompt, 0, 20)
        index = self.states.req_id_to_index[req_id]
        sampling_params = SamplingParams(**params)
        self.sampler.add_request(index, sampling_params)
        self.tables.append_block_ids(index, ([*range(16 * index + 1, 16 * index + 17)],), overwrite=True)

    def round(self, scheduled: dict[str, int]) -> Any:
        states, buffers = self.states, self.buffers
        states.apply_staged_writes()
        self.sampler.apply_staged_writes()
        self.tables.apply_staged_writes()
        req_ids = list(scheduled)
        num_reqs = len(req_ids)
        idx_np = np.array([states.req_id_to_index[req_id] for req_id in req_ids])
        idx = torch.from_numpy(idx_np)
        lengths = np.array([*scheduled.values()], dtype=np.int32)
        buffers.query_start_loc[: num_reqs + 1] = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))))
        query_start_loc = buffers.query_start_loc[: num_reqs + 1]
        num_tokens = int(lengths.sum())
        launchers.prepare_prefill_inputs(
            buffers.input_ids,
            states.next_prefill_tokens,
            idx,
            query_start_loc,
            states.all_token_ids.gpu,
            states.prefill_len.gpu,
            states.num_computed_tokens.gpu,
        )
        launchers.prepare_pos_seq_lens(
            idx, query_start_loc, states.num_computed_tokens.gpu, buffers.positions, buffers.seq_lens
        )
        cu_num_logits = torch.arange(num_reqs + 1, dtype=torch.int32)
        logits_indices = launchers.combine_sampled_and_draft_tokens(
            buffers.input_ids,
            idx,
            states.last_sampled_tokens,
            query_start_loc,
            buffers.seq_lens,
            states.prefill_len.gpu,
            states.draft_tokens,
            cu_num_logits,
            num_reqs,
        )
        batch = InputBatch.make_dummy(num_reqs, max(num_tokens, num_reqs), InputBuffers(MAX_REQS, MAX_TOKENS, CPU))
        batch.idx_mapping, batch.idx_mapping_np, batch.expanded_idx_mapping = idx, idx_np, idx
        batch.input_ids, batch.positions = buffers.input_ids[:num_tokens], buffers.positions[:num_tokens]
        batch.seq_lens = buffers.seq_lens[:num_reqs]
        batch.logits_indices, batch.cu_num_logits, batch.cu_num_logits_np = (
            logits_indices,
            cu_num_logits,
            cu_num_logits.numpy(),
        )
        self.gathered = self.tables.gather_block_tables(idx, num_reqs + 1)[0].clone()
        self.slots = self.tables.compute_slot_mappings(idx, query_start_loc, buffers.positions, MAX_TOKENS)[0].clone()
        logits = torch.from_numpy(self.noise[:num_reqs].astype(np.float32))
        logits[torch.arange(num_reqs), (batch.input_ids[logits_indices].long() + 1) % VOCAB] += self.confidence
        output = self.sampler(logits, batch)
        launchers.post_update(
            idx,
            states.num_computed_tokens.gpu,
            states.last_sampled_tokens,
            self.sampler.penalties_state.output_bin_counts,
            output.sampled_token_ids,
            output.num_sampled,
            output.num_rejected,
            query_start_loc,
            states.all_token_ids.gpu,
            states.total_len.gpu,
        )
        return output

    def tokens(self, req_id: str) -> list[int]:
        index = self.states.req_id_to_index[req_id]
        return self.states.all_token_ids.gpu[index, : int(self.states.total_len.gpu[index])].tolist()


@pytest.fixture(autouse=True, params=[False, True], ids=["", "inference_mode"])
def _inference_mode(request: pytest.FixtureRequest) -> Any:
    with torch.inference_mode(request.param):
        yield


def test_chunked_prefill_and_decode() -> None:
    runner = Runner()
    runner.add("a", [3, 9, 5, 7, 11], temperature=0.0)
    runner.add("b", [20, 21], temperature=0.0)
    output = runner.round({"a": 3, "b": 2})
    # Row a has not finished its prompt, so it sampled nothing.
    assert output.num_sampled.tolist() == [0, 1] and output.num_rejected.tolist() == [0, 0]
    a = runner.states.req_id_to_index["a"]
    assert runner.states.next_prefill_tokens[0, a] == 7
    runner.round({"b": 1, "a": 2})
    for _ in range(3):
        runner.round({"a": 1, "b": 1})
    assert runner.tokens("a") == [3, 9, 5, 7, 11, 12, 13, 14, 15]
    assert runner.tokens("b") == [20, 21, 22, 23, 24, 25, 26]
    assert int(runner.states.num_computed_tokens.gpu[a]) == 8
    # Row 0 is a, whose eighth token stands at position 7: in its second block, at the last place.
    assert runner.slots.tolist() == [(16 * a + 2) * BLOCK + 3, int(runner.slots[1])] + [-1] * (MAX_TOKENS - 2)
    assert runner.gathered[0, :2].tolist() == [16 * a + 1, 16 * a + 2]
    assert not runner.gathered[2].any()
    assert runner.buffers.seq_lens.tolist() == [8, 6, 0, 0, 0, 0, 0, 0]


def test_every_sampling_option_in_one_batch() -> None:
    """Options that leave one token, or forbid one, so that the outcome is known whatever the noise."""
    runner = Runner()
    runner.confidence = 30.0
    runner.add("topk", [1], temperature=1.5, top_k=1, seed=1)
    runner.add("topp", [2], temperature=0.7, top_p=0.01)
    runner.add("minp", [3], temperature=1.0, min_p=0.9)
    runner.add("bias", [4], temperature=0.0, logit_bias={30: 100.0}, repetition_penalty=1.1, logprobs=3)
    runner.add("allowed", [5], temperature=1.0, allowed_token_ids=[17], logprob_token_ids=[17, 6])
    runner.add("penalised", [8], temperature=0.0, presence_penalty=2.0, frequency_penalty=2.0, min_tokens=3)
    outputs = [runner.round(dict.fromkeys(runner.states.req_id_to_index, 1)) for _ in range(2)]
    assert runner.tokens("topk") == [1, 2, 3]
    assert runner.tokens("topp") == [2, 3, 4]
    assert runner.tokens("minp") == [3, 4, 5]
    assert runner.tokens("bias") == [4, 30, 30]
    assert runner.tokens("allowed") == [5, 17, 17]
    assert runner.tokens("penalised") == [8, 9, 10]
    logprobs = outputs[0].logprobs_tensors
    rows = list(runner.states.req_id_to_index)
    assert logprobs.logprob_token_ids[rows.index("bias"), 0] == 30
    assert logprobs.logprob_token_ids[rows.index("allowed"), :3].tolist() == [17, 17, 6]
    assert (logprobs.selected_token_ranks >= 1).all()


def test_a_seed_gives_the_same_tokens_in_any_row() -> None:
    def sample(order: list[str]) -> list[int]:
        runner = Runner()
        runner.confidence = 0.0
        for req_id in order:
            runner.add(req_id, [7], temperature=1.0, seed=5 if req_id == "seeded" else None)
        # The same logits for every row, round and run, so that only the noise tells tokens apart.
        runner.noise = np.broadcast_to(np.random.default_rng(0).standard_normal(VOCAB), (MAX_REQS, VOCAB))
        for _ in range(4):
            runner.round(dict.fromkeys(order, 1))
        return runner.tokens("seeded")

    assert sample(["seeded"]) == sample(["other", "third", "seeded"])


def test_bad_words() -> None:
    runner = Runner()
    params = SamplingParams(temperature=0.0)
    params._bad_words_token_ids = [[12], [21, 22]]
    runner.add("a", [10], temperature=0.0)
    runner.add("b", [19], temperature=0.0)
    for req_id in ("a", "b"):
        index = runner.states.req_id_to_index[req_id]
        runner.sampler.add_request(index, params)
    for _ in range(3):
        runner.round({"a": 1, "b": 1})
    assert 12 not in runner.tokens("a")[1:]
    # 20, 21, then anything but 22.
    assert runner.tokens("b")[:3] == [19, 20, 21] and runner.tokens("b")[3] != 22


def test_the_runner_itself_launches_the_native_kernels() -> None:
    """The runner's module was imported after the registration and holds the launchers by name."""
    assert model_runner.post_update is launchers.post_update
