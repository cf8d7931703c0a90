"""vLLM's n-gram proposer and rejection sampler on the native kernels, in a process that has no Triton."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu import input_batch as launchers
from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample
from vllm.v1.worker.gpu.states import RequestState

from vllm_handoff.worker.cpu_kernels.registration import NATIVE_KERNELS

CPU = torch.device("cpu")
MAX_REQS, MAX_LEN, MAX_TOKENS, VOCAB, STEPS = 4, 64, 64, 30, 3


class Speculation:
    """The model runner's calls around verification and proposing, for a model that repeats a phrase for ever."""

    def __init__(self, phrase: list[int], method: str = "standard") -> None:
        self.following = {token: phrase[(i + 1) % len(phrase)] for i, token in enumerate(phrase)}
        self.states = RequestState(MAX_REQS, MAX_LEN, MAX_TOKENS, STEPS, VOCAB, CPU)
        self.sampler = Sampler(SimpleNamespace(reasoning_config=None), MAX_REQS, VOCAB, CPU, self.states)
        config = SimpleNamespace(
            num_speculative_tokens=STEPS,
            enable_adaptive_verification=False,
            rejection_sample_method=method,
            prompt_lookup_min=1,
            prompt_lookup_max=2,
        )
        self.rejection_sampler = RejectionSampler(self.sampler, config, CPU)
        self.speculator = NgramGPUSpeculator(
            SimpleNamespace(
                speculative_config=config,
                scheduler_config=SimpleNamespace(max_num_seqs=MAX_REQS),
                model_config=SimpleNamespace(max_model_len=MAX_LEN),
            ),
            CPU,
            self.states,
        )

    def add(self, req_id: str, prompt: list[int], **params: Any) -> None:
        self.states.add_request(req_id, len(prompt), prompt, 0, 20)
        self.sampler.add_request(self.states.req_id_to_index[req_id], SamplingParams(**params))

    def round(self, scheduled: dict[str, tuple[int, int]]) -> Any:
        """One step.

        Args:
            scheduled: request -> (tokens, how many of them are drafts).
        """
        states = self.states
        states.apply_staged_writes()
        self.sampler.apply_staged_writes()
        num_reqs = len(scheduled)
        idx_np = np.array([states.req_id_to_index[req_id] for req_id in scheduled])
        idx = torch.from_numpy(idx_np)
        lengths, num_drafts = np.array([*scheduled.values()]).T
        query_start_loc = torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
        cu_num_logits = torch.from_numpy(np.concatenate(([0], np.cumsum(num_drafts + 1))).astype(np.int32))
        num_logits = int(cu_num_logits[-1])
        buffers = InputBuffers(MAX_REQS, MAX_TOKENS, CPU)
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
        logits_indices = launchers.combine_sampled_and_draft_tokens(
            buffers.input_ids,
            idx,
            states.last_sampled_tokens,
            query_start_loc,
            buffers.seq_lens,
            states.prefill_len.gpu,
            states.draft_tokens,
            cu_num_logits,
            num_logits,
        )
        batch = InputBatch.make_dummy(num_reqs, MAX_TOKENS, InputBuffers(MAX_REQS, MAX_TOKENS, CPU))
        batch.idx_mapping, batch.idx_mapping_np = idx, idx_np
        batch.expanded_idx_mapping, batch.expanded_local_pos = launchers.expand_idx_mapping(
            idx, num_logits, cu_num_logits, STEPS + 1
        )
        batch.input_ids, batch.positions = buffers.input_ids, buffers.positions
        batch.seq_lens = batch.seq_lens_cpu_upper_bound = buffers.seq_lens[:num_reqs]
        batch.logits_indices, batch.cu_num_logits = logits_indices, cu_num_logits
        batch.cu_num_logits_np = cu_num_logits.numpy()
        logits = torch.zeros(num_logits, VOCAB)
        for row, token in enumerate(buffers.input_ids[logits_indices].tolist()):
            logits[row, self.following.get(token, 0)] = 50.0
        output = self.rejection_sampler(logits, batch)
        launchers.post_update(
            idx,
            states.num_computed_tokens.gpu,
            states.last_sampled_tokens,
            None,
            output.sampled_token_ids,
            output.num_sampled,
            output.num_rejected,
            query_start_loc,
            states.all_token_ids.gpu,
            states.total_len.gpu,
        )
        unused = [None] * 4
        drafts = self.speculator.propose(
            batch, *unused, output.num_sampled, output.num_rejected, states.last_sampled_tokens, None, None, None
        )
        states.draft_tokens[idx] = drafts
        return output

    def tokens(self, req_id: str) -> list[int]:
        index = self.states.req_id_to_index[req_id]
        return self.states.all_token_ids.gpu[index, : int(self.states.total_len.gpu[index])].tolist()


@pytest.fixture(autouse=True, params=[False, True], ids=["", "inference_mode"])
def _inference_mode(request: pytest.FixtureRequest) -> Any:
    with torch.inference_mode(request.param):
        yield


@pytest.mark.parametrize("method", ["standard", "block"])
def test_a_repeated_phrase_is_accepted(method: str) -> None:
    """A prompt with the phrase twice, so that all drafts are right, greedy and random, next to one in its prompt."""
    phrase = [5, 6, 7, 8, 9]
    runner = Speculation(phrase, method)
    runner.add("greedy", phrase * 2, temperature=0.0, logprobs=1)
    runner.add("random", phrase * 2, temperature=1.0, seed=3)
    runner.add("prompt", [1, 2, 3, 4, 5, 6], temperature=0.0)
    output = runner.round({"greedy": (10, 0), "prompt": (2, 0), "random": (10, 0)})
    assert output.num_sampled.tolist() == [1, 0, 1] and output.num_rejected.tolist() == [0, 0, 0]
    assert runner.states.draft_tokens[runner.states.req_id_to_index["greedy"]].tolist() == [6, 7, 8]
    output = runner.round({"prompt": (2, 0), "greedy": (4, 3), "random": (3, 2)})
    assert output.num_sampled.tolist() == [0, 4, 3] and output.num_rejected.tolist() == [0, 0, 0]
    logprobs = output.logprobs_tensors
    # Every token of the request that asked for it has its own row.
    assert logprobs.cu_num_generated_tokens == [0, 1, 5, 8]
    assert logprobs.logprob_token_ids[1:5, 0].tolist() == [6, 7, 8, 9]
    output = runner.round({"greedy": (4, 3), "random": (4, 3), "prompt": (2, 0)})
    assert output.num_sampled.tolist() == [4, 4, 1]
    assert runner.tokens("greedy") == (phrase * 4)[:19]
    assert runner.tokens("random") == (phrase * 4)[:18]
    assert runner.tokens("prompt") == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_wrong_drafts_are_replaced(temperature: float) -> None:
    """The prompt goes on after the phrase's end in a way that the model never would."""
    runner = Speculation([5, 6, 7, 8])
    runner.add("a", [5, 6, 20, 21, 5], temperature=temperature, seed=1)
    runner.round({"a": (5, 0)})
    assert runner.tokens("a")[5:] == [6]
    assert runner.states.draft_tokens[runner.states.req_id_to_index["a"]].tolist() == [20, 21, 5]
    output = runner.round({"a": (4, 3)})
    assert output.num_sampled.tolist() == [1] and output.num_rejected.tolist() == [3]
    assert runner.tokens("a")[5:] == [6, 7]
    # The three rejected tokens are not computed: 5 of the prompt and the one sampled before.
    assert int(runner.states.num_computed_tokens.gpu[runner.states.req_id_to_index["a"]]) == 6


TARGET, DRAFT = np.array([0.4, 0.3, 0.15, 0.1, 0.05]), np.array([0.1, 0.2, 0.3, 0.1, 0.3])


def _verify_many(
    target: np.ndarray, draft: np.ndarray | None, num_rows: int, use_block_verification: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens [num_rows, STEPS + 1] that come out of drafts drawn from `draft`, and how many count in each row.

    Args:
        target, draft: [vocab] probabilities, the same at every step; without `draft` it is always token 1.
    """
    rng = np.random.default_rng(1)
    vocab, num_logits = target.shape[0], num_rows * (STEPS + 1)
    drafts = np.ones(num_logits, dtype=np.int32)
    if draft is not None:
        drafts = rng.choice(vocab, num_logits, p=draft).astype(np.int32)
    logits = torch.from_numpy(np.log(target).astype(np.float32)).repeat(num_logits, 1)
    idx = torch.arange(num_rows)
    temperature = 0.5
    draft_logits = None
    if draft is not None:
        # Divided by the temperature by those who read them.
        draft_logits = torch.from_numpy((np.log(draft) * temperature).astype(np.float32)).repeat(num_rows, STEPS, 1)
    sampled, num_sampled = rejection_sample(
        logits,
        draft_logits,
        torch.from_numpy(drafts),
        torch.arange(num_rows + 1, dtype=torch.int32) * (STEPS + 1),
        torch.arange(STEPS + 1).repeat(num_rows) + 100,
        idx,
        idx.repeat_interleave(STEPS + 1),
        torch.arange(STEPS + 1, dtype=torch.int32).repeat(num_rows),
        torch.full((num_rows,), temperature),
        torch.from_numpy(rng.integers(0, 1 << 62, num_rows)),
        STEPS,
        use_block_verification=use_block_verification,
    )
    return sampled.numpy(), num_sampled.numpy()


@pytest.mark.parametrize("use_block_verification", [False, True])
@pytest.mark.parametrize("certain", [False, True])
def test_tokens_follow_the_targets_distribution(use_block_verification: bool, certain: bool) -> None:
    """However bad the drafts are: this is what rejection sampling is for."""
    num_rows, vocab = 40_000, TARGET.shape[0]
    tokens, counts = _verify_many(TARGET, None if certain else DRAFT, num_rows, use_block_verification)
    # What a later step would sample.
    later = np.random.default_rng(2).choice(vocab, num_rows, p=TARGET)
    second = np.where(counts >= 2, tokens[:, 1], later)
    assert 0.2 < (counts >= 2).mean() < 0.8
    together = np.bincount(tokens[:, 0] * vocab + second, minlength=vocab**2) / num_rows
    expected = np.outer(TARGET, TARGET).reshape(-1)
    np.testing.assert_array_less(np.abs(together - expected), 4.5 * np.sqrt(expected / num_rows))


def test_block_verification_accepts_more() -> None:
    num_sampled = [_verify_many(TARGET, DRAFT, 40_000, block)[1].sum() for block in (False, True)]
    assert num_sampled[1] > num_sampled[0]


def test_a_watermark_is_refused() -> None:
    kernel = NATIVE_KERNELS["vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils._resample_kernel"]
    with pytest.raises(NotImplementedError, match="Watermarking"):
        kernel(*[None] * 31, True, False)
