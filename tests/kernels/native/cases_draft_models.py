"""vLLM's own proposers, run end to end on the native kernels around a model that counts, without Triton."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.spec_decode import speculator as base
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

CPU = torch.device("cpu")
MAX_REQS, MAX_LEN, MAX_TOKENS, VOCAB, BLOCK, DRAFTS = 4, 32, 24, 40, 4, 3


class Counter(torch.nn.Module):
    """A model whose hidden state is its token, and whose next token is one more."""

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 50.0 * torch.nn.functional.one_hot((hidden_states[:, 0].long() + 1) % VOCAB, VOCAB).float()


class Seen(list[dict[str, Any]]):
    """What each forward pass was given."""

    def note(self, speculator: Any, tokens: torch.Tensor, positions: torch.Tensor, slots: Any) -> None:
        buffers = speculator.input_buffers
        self.append(
            {
                "tokens": tokens.tolist(),
                "positions": positions.tolist(),
                "slots": slots["layer"][: tokens.shape[0]].tolist(),
                "seq_lens": buffers.seq_lens.tolist(),
                "query_start_loc": buffers.query_start_loc.tolist(),
            }
        )


class CountingEagle(EagleSpeculator):
    def _run_model(self, num_tokens: int, attn_metadata: Any, slots: Any, *args: Any, **kwargs: Any) -> Any:
        buffers = self.input_buffers
        self.seen.note(self, buffers.input_ids[:num_tokens], buffers.positions[:num_tokens], slots)
        hidden_states = buffers.input_ids[:num_tokens, None].to(self.dtype).expand(-1, self.hidden_size)
        # What it was given beside the tokens: the target's hidden states, then its own.
        self.seen[-1]["hidden_states"] = self.hidden_states[:num_tokens, 0].tolist()
        return hidden_states, hidden_states


class CountingModel(StandaloneARSpeculator):
    def _run_model(self, tokens: torch.Tensor, positions: torch.Tensor, attn_metadata: Any, slots: Any, _: Any) -> Any:
        self.seen.note(self, tokens, positions, slots)
        return tokens[:, None].to(self.dtype)


def _speculator(kind: type, monkeypatch: pytest.MonkeyPatch, probabilistic: bool, dtype: torch.dtype) -> Any:
    draft_model = SimpleNamespace(get_hidden_size=lambda: 6, get_vocab_size=lambda: VOCAB)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            method="eagle",
            num_speculative_tokens=DRAFTS,
            draft_model_config=draft_model,
            use_local_argmax_reduction=False,
            enable_adaptive_verification=False,
            draft_sample_method="probabilistic" if probabilistic else "greedy",
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_REQS, max_num_batched_tokens=MAX_TOKENS),
        model_config=SimpleNamespace(
            max_model_len=MAX_LEN, dtype=dtype, head_dtype=torch.float32, use_fp64_gumbel=False
        ),
        parallel_config=SimpleNamespace(data_parallel_size=1, data_parallel_rank=0, decode_context_parallel_size=1),
    )
    monkeypatch.setattr(base, "_target_feeds_hc_residual", lambda _: False)
    speculator = kind(config, CPU)
    speculator.model, speculator.seen = Counter(), Seen()
    speculator.block_tables = BlockTables([BLOCK], MAX_REQS, MAX_TOKENS, [MAX_LEN // BLOCK], CPU)
    for req in range(MAX_REQS):
        speculator.block_tables.append_block_ids(req, ([*range(8 * req + 1, 8 * req + 9)],), overwrite=True)
    speculator.block_tables.apply_staged_writes()
    speculator.kv_cache_config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["layer"])])
    speculator.expanded_slot_mappings = torch.empty(1, MAX_TOKENS + MAX_REQS, dtype=torch.int64)
    monkeypatch.setattr(kind, "_build_attn_metadata", lambda self, **kwargs: {})
    return speculator


def _propose(speculator: Any) -> list[list[int]]:
    """Drafts for three rows: one in its prompt; one that decodes and had two of three drafts rejected; a new one."""
    lengths = torch.tensor([3, 4, 2])
    query_start_loc = torch.tensor([0, 3, 7, 9], dtype=torch.int32)
    positions = torch.tensor([4, 5, 6, 10, 11, 12, 13, 0, 1])
    seq_lens = torch.tensor([7, 14, 2], dtype=torch.int32)
    batch = SimpleNamespace(
        num_reqs=3,
        num_tokens=9,
        num_tokens_after_padding=9,
        num_scheduled_tokens=lengths.numpy(),
        idx_mapping=torch.tensor([2, 0, 3]),
        query_start_loc=query_start_loc,
        query_start_loc_np=query_start_loc.numpy(),
        input_ids=torch.tensor([20, 21, 22, 5, 6, 9, 9, 30, 31], dtype=torch.int32),
        positions=positions,
        seq_lens=seq_lens,
        seq_lens_cpu_upper_bound=seq_lens,
        decode_graph_eligible=False,
    )
    speculator.input_buffers.input_ids.zero_()
    last_sampled = torch.tensor([[7], [-9], [-9], [32]])
    slots = {
        "layer": speculator.block_tables.compute_slot_mappings(
            batch.idx_mapping, query_start_loc, positions, MAX_TOKENS
        )[0].clone()
    }
    drafts = speculator.propose(
        batch,
        {},
        slots,
        100.0 + torch.arange(9.0)[:, None].expand(-1, 6).to(speculator.dtype),
        None,
        torch.tensor([0, 2, 1], dtype=torch.int32),
        torch.tensor([0, 2, 0], dtype=torch.int32),
        last_sampled,
        torch.tensor([[-9, -9, 23, -9]], dtype=torch.int32),
        torch.tensor([0.0, 1.0, 1.0, 0.5]),
        torch.tensor([1, 2, 3, 4]),
        # Without graphs.
        is_profile=True,
    )
    return drafts.tolist()


def _slot(req: int, position: int) -> int:
    return (8 * req + 1) * BLOCK + position


@pytest.fixture(autouse=True, params=[False, True], ids=["", "inference_mode"])
def _inference_mode(request: pytest.FixtureRequest) -> Any:
    with torch.inference_mode(request.param):
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("probabilistic", [False, True])
def test_eagle(probabilistic: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    speculator = _speculator(CountingEagle, monkeypatch, probabilistic, dtype)
    for _ in range(2):
        speculator.seen.clear()
        # After 23, the prompt's next token, and after the sampled 7 and 32.
        assert _propose(speculator) == [[24, 25, 26], [8, 9, 10], [33, 34, 35]]
    first, second, third = speculator.seen
    # The second row keeps two tokens, 5 and 6, and the places of those rejected.
    assert first["tokens"][:5] == [21, 22, 23, 6, 7] and first["tokens"][7:] == [31, 32]
    assert first["positions"][:5] == [4, 5, 6, 10, 11] and first["positions"][7:] == [0, 1]
    assert first["hidden_states"] == [100.0 + i for i in range(9)]
    assert first["seq_lens"] == [7, 14, 2, 0] and first["query_start_loc"] == [0, 3, 7, 9, 9]
    assert second["tokens"] == [24, 8, 33] and third["tokens"] == [25, 9, 34]
    assert second["hidden_states"] == [23.0, 7.0, 32.0] and third["hidden_states"] == [24.0, 8.0, 33.0]
    assert second["positions"] == [7, 12, 2] and third["positions"] == [8, 13, 3]
    assert second["seq_lens"] == [8, 13, 3, 0] and third["seq_lens"] == [9, 14, 4, 0]
    assert second["query_start_loc"] == third["query_start_loc"] == [0, 1, 2, 3, 3]
    assert third["slots"] == [_slot(2, 8), _slot(0, 13), _slot(3, 3)]


@pytest.mark.parametrize("probabilistic", [False, True])
def test_standalone_model(probabilistic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    speculator = _speculator(CountingModel, monkeypatch, probabilistic, torch.float32)
    for _ in range(2):
        speculator.seen.clear()
        drafts = _propose(speculator)
    # A row in its prompt gets drafts of no use: its next token is not one that was sampled.
    assert drafts[1:] == [[8, 9, 10], [33, 34, 35]]
    first, second, third = speculator.seen
    assert first["tokens"][4:] == [5, 6, 7, 0, 0, 30, 31, 32]
    assert first["positions"] == [4, 5, 6, 7, 10, 11, 12, 13, 14, 0, 1, 2]
    reqs = [2] * 4 + [0] * 5 + [3] * 3
    assert first["slots"] == [_slot(*place) for place in zip(reqs, first["positions"], strict=True)]
    assert first["seq_lens"] == [8, 15, 3, 0] and first["query_start_loc"] == [0, 4, 9, 12, 12]
    assert second["tokens"][1:] == [8, 33] and third["tokens"][1:] == [9, 34]
    assert second["positions"] == [8, 13, 3] and third["positions"] == [9, 14, 4]
    assert second["seq_lens"] == [9, 14, 4, 0] and third["seq_lens"] == [10, 15, 5, 0]
    assert third["slots"] == [_slot(2, 9), _slot(0, 14), _slot(3, 4)]
