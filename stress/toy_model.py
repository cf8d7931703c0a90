"""A vLLM model whose next token is a known function of its request: toy_tokens.py says which.

The token depends on the newest token and its position, on the request's first
token (read from the KV cache of the first layer) and, per further layer, on
the token at an earlier position that changes with every step. So a token that
is lost, doubled or given to another request, and a block of KV cache that is
somebody else's, change every token after it.

It is exact in every dtype and with every attention backend: what is stored and
read is bits, zero or one, and what crosses a stage boundary is digits below 64.
No branch and no shape depends on data, so it can be captured in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import get_pp_group
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.interfaces import SupportsPP
from vllm.model_executor.models.utils import maybe_prefix
from vllm.sequence import IntermediateTensors

from vllm_handoff.stress.toy_tokens import ARCHITECTURE, GAP, HEAD_SIZE, VOCABULARY, fold, mix

_POSITION_BITS = 16
_TOKEN_BITS = 12
# A key that differs in one bit of its position loses 2 * _SHARPNESS**2 = 32 to the right one: e**-32 of its weight.
_SHARPNESS = 4.0
_DIGITS = 3
# Digits of the token, its position, and what the layers have read so far.
_COLUMNS = 3 * _DIGITS


def register() -> None:
    """Make the architecture known to vLLM in this process. Can be called again."""
    from vllm import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, HandoffStressToyForCausalLM)


class HandoffStressToyForCausalLM(nn.Module, SupportsPP):
    """Attention layers without weights, spread over the stages as any model's layers are."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        pp = get_pp_group()
        self.is_first, self.is_last = pp.is_first_rank, pp.is_last_rank
        layers = vllm_config.model_config.hf_config.num_hidden_layers
        self.start, self.end = get_pp_indices(layers, pp.rank_in_group, pp.world_size)
        self.dtype = vllm_config.model_config.dtype
        self.layers = nn.ModuleList(_Layer(i, maybe_prefix(prefix, f"layers.{i}")) for i in range(self.start, self.end))

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(_digits(input_ids.long()), (0, 2 * _DIGITS)).to(self.dtype)

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        return IntermediateTensors({"digits": torch.zeros(batch_size, _COLUMNS, dtype=dtype, device=device)})

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        positions = positions.long()
        if self.is_first:
            assert input_ids is not None
            token, carried, seen = input_ids.long(), positions, torch.zeros_like(positions)
        else:
            assert intermediate_tensors is not None
            digits = intermediate_tensors["digits"]
            token, carried, seen = (_number(part) for part in digits.split(_DIGITS, dim=1))
        for layer in self.layers:
            seen = fold(seen, layer(token, positions))
        # The position that came with the hop has to be that of this stage's own batch.
        seen = seen + 7919 * (carried - positions)
        states = torch.cat([_digits(token), _digits(positions), _digits(seen)], dim=1).to(self.dtype)
        return states if self.is_last else IntermediateTensors({"digits": states})

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        due = mix(*(_number(part) for part in hidden_states.split(_DIGITS, dim=1)))
        ring = torch.arange(VOCABULARY, device=hidden_states.device)
        return GAP * (VOCABULARY - (ring - due.unsqueeze(1)) % VOCABULARY).float()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        return set()


class _Layer(nn.Module):
    """Reads the token at one earlier position."""

    def __init__(self, index: int, prefix: str) -> None:
        super().__init__()
        self.index = index
        config = get_current_vllm_config()
        self.dtype = config.model_config.dtype
        self.attn = Attention(
            num_heads=1, head_size=HEAD_SIZE, scale=1.0, cache_config=config.cache_config, prefix=f"{prefix}.attn"
        )

    def forward(self, token: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.index == 0:
            wanted = torch.zeros_like(positions)
        else:
            wanted = (positions * 2_654_435_761 + self.index * 40_503) % (positions + 1)
        # Signs of a position's bits: the product of two is largest if they are equal.
        query = _SHARPNESS * (2 * _bits(wanted, _POSITION_BITS) - 1)
        key = _SHARPNESS * (2 * _bits(positions, _POSITION_BITS) - 1)
        value = _bits(token, _TOKEN_BITS)
        padded = (
            nn.functional.pad(part, (0, HEAD_SIZE - part.shape[1])).to(self.dtype) for part in (query, key, value)
        )
        read = self.attn(*padded)[:, :_TOKEN_BITS] > 0.5
        powers: Any = 2 ** torch.arange(_TOKEN_BITS, device=token.device)
        return (read.long() * powers).sum(1)


def _bits(numbers: torch.Tensor, count: int) -> torch.Tensor:
    return ((numbers.unsqueeze(1) >> torch.arange(count, device=numbers.device)) & 1).float()


def _digits(numbers: torch.Tensor) -> torch.Tensor:
    return ((numbers.unsqueeze(1) >> (6 * torch.arange(_DIGITS, device=numbers.device))) & 63).float()


def _number(digits: torch.Tensor) -> torch.Tensor:
    digits = digits.float().nan_to_num().long()
    return (digits << (6 * torch.arange(_DIGITS, device=digits.device))).sum(1)
