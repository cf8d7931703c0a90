"""A model whose next token is a known function of everything it should have seen.

The next token depends on the last token and its position, on the request's
first token (looked up in the KV cache of stage 0) and on the sum of all its
tokens (taken over the KV cache of stage 1). A token that is lost, doubled or
given to another request, and a block of KV cache that is somebody else's, change
every token after it. toy_tokens.py says what each should have been.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.interfaces import SupportsPP
from vllm.model_executor.models.utils import maybe_prefix
from vllm.sequence import IntermediateTensors

from toy_tokens import ARCHITECTURE, HEAD_SIZE, VOCABULARY, mix

# What crosses the stage boundary for each token: itself, its position, the request's first token.
COLUMNS = 3


def register() -> None:
    """Make the architecture known to vLLM, in this process and those forked from it."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, HandoffToyForCausalLM)


class HandoffToyForCausalLM(nn.Module, SupportsPP):
    """Two attention layers without weights; the first stage has one, the last the other."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        pp = get_pp_group()
        self.is_first, self.is_last = pp.is_first_rank, pp.is_last_rank
        # The whole numbers below 2**24 are exact in float32.
        self.first_token = _attention(maybe_prefix(prefix, "layers.0.attn")) if self.is_first else None
        self.sums = _attention(maybe_prefix(prefix, "layers.1.attn")) if self.is_last else None

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(input_ids.unsqueeze(1).float(), (0, COLUMNS - 1))

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        return IntermediateTensors({"states": torch.zeros(batch_size, COLUMNS, dtype=dtype, device=device)})

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        if self.first_token is not None:
            states = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds.clone()
            states[:, 1] = positions
            # All attention goes to position 0, whose key is the only one that is not zero.
            query, key, value = (states.new_zeros(len(states), HEAD_SIZE) for _ in range(3))
            query[:, 0], key[:, 0] = 30.0, 30.0 * (positions == 0)
            value[:, 0] = states[:, 0]
            states[:, 2] = self.first_token(query, key, value)[:, 0]
        else:
            assert intermediate_tensors is not None
            states = intermediate_tensors["states"]
        if self.sums is None:
            return IntermediateTensors({"states": states})
        # Equal keys: the result is the mean. In two halves, so that the sums are small enough to be exact.
        query, key, value = (states.new_zeros(len(states), HEAD_SIZE) for _ in range(3))
        value[:, 0], value[:, 1] = states[:, 0] % 64, states[:, 0] // 64
        halves = (self.sums(query, key, value)[:, :2] * (positions + 1).unsqueeze(1)).round()
        total = halves[:, 0] + 64 * halves[:, 1]
        # The position that came with the hop has to be that of this stage's own batch.
        misplaced = 1_000_003 * (states[:, 1] - positions)
        return torch.cat([states, total.unsqueeze(1), misplaced.unsqueeze(1)], dim=1)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        last, position, first, total, misplaced = hidden_states.nan_to_num().long().unbind(1)
        token = (mix(last, position, first, total) + misplaced) % VOCABULARY
        return nn.functional.one_hot(token, VOCABULARY).float()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return set()


def _attention(prefix: str) -> Attention:
    cache_config = get_current_vllm_config().cache_config
    return Attention(num_heads=1, head_size=HEAD_SIZE, scale=1.0, cache_config=cache_config, prefix=prefix)
