"""What a model's config.json says about the work of its layers. Needs neither torch nor transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class ModelShapeError(ValueError):
    """A configuration from which the work of a layer cannot be told."""


@dataclass(frozen=True)
class LayerShape:
    """One decoder layer, counted in parameters.

    Attributes:
        always: read by every round and used by every token (attention, dense MLP, router, shared experts).
        expert: of one routed expert, 0 in a dense layer.
        experts: routed experts.
        experts_per_token: routed experts that one token uses.
    """

    always: int
    expert: int = 0
    experts: int = 0
    experts_per_token: int = 0

    @property
    def used(self) -> int:
        """Parameters that one token is multiplied with."""
        return self.always + self.expert * self.experts_per_token

    def read(self, tokens: float) -> float:
        """Parameters that a round of `tokens` tokens reads: each expert only if some token uses it."""
        if not self.experts:
            return self.always
        untouched = (1 - self.experts_per_token / self.experts) ** tokens
        return self.always + self.expert * self.experts * (1 - untouched)


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer.

    Attributes:
        layers: its decoder layers, first to last.
        hidden: width of the hidden states.
        vocab: rows of the embedding and of the head.
        attention_width: heads x head dimension, the width in which queries meet keys.
        kv_width: elements of keys and values that one token leaves behind in one layer.
        weight_bytes: bytes a parameter of a layer; 2 for bfloat16, less if quantised.
        head_bytes: bytes a parameter of embedding and head, which are seldom quantised.
        tied: the head shares the embedding's weights. On several stages the last one holds a copy.
    """

    layers: tuple[LayerShape, ...]
    hidden: int
    vocab: int
    attention_width: int
    kv_width: int
    weight_bytes: float = 2.0
    head_bytes: float = 2.0
    tied: bool = False

    @property
    def head(self) -> int:
        """Parameters of the head."""
        return self.hidden * self.vocab

    @classmethod
    def load(cls, model: Path) -> ModelShape:
        """From a model's folder, or the path of a config.json.

        Raises:
            ModelShapeError: there is no such file, or it does not describe a decoder-only transformer.
        """
        path = model / "config.json" if model.is_dir() else model
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ModelShapeError(f"{path} cannot be read as a model's config.json: {error}") from error
        return cls.of(config)

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelShape:
        """From the contents of a config.json.

        Raises:
            ModelShapeError: a size is missing, or the layers are not attention and MLP.
        """
        if isinstance(config.get("text_config"), Mapping):  # multimodal: the language model is what is split
            config = {**config, **config["text_config"]}
        for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
            if not isinstance(config.get(name), int):
                raise ModelShapeError(f"the model's configuration has no {name}: its layers cannot be weighed")
        if config.get("is_encoder_decoder") or any("mamba" in name or "ssm" in name for name in config):
            raise ModelShapeError("only decoder-only transformers can be planned, without recurrent layers")
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        attention, attention_width, kv_width = _attention(config, hidden, heads)
        return cls(
            layers=tuple(_layer(config, hidden, attention, index) for index in range(config["num_hidden_layers"])),
            hidden=hidden,
            vocab=config["vocab_size"],
            attention_width=attention_width,
            kv_width=kv_width,
            weight_bytes=_weight_bytes(config),
            head_bytes=_dtype_bytes(config),
            tied=bool(config.get("tie_word_embeddings")),
        )


def _attention(config: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int, int]:
    """(parameters, heads x head dimension, elements of keys and values a token) of one layer."""
    head_dim = config.get("head_dim") or hidden // heads
    if config.get("kv_lora_rank"):  # multi-head latent attention: one latent serves keys and values
        latent, rope = config["kv_lora_rank"], config.get("qk_rope_head_dim", 64)
        nope, value = config.get("qk_nope_head_dim", 128), config.get("v_head_dim", 128)
        rank = config.get("q_lora_rank")
        queries = rank * (hidden + heads * (nope + rope)) if rank else hidden * heads * (nope + rope)
        rest = hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
        return queries + rest, heads * (nope + rope), latent + rope
    kv_heads = config.get("num_key_value_heads") or heads
    return hidden * head_dim * (2 * heads + 2 * kv_heads), heads * head_dim, 2 * kv_heads * head_dim


def _layer(config: Mapping[str, Any], hidden: int, attention: int, index: int) -> LayerShape:
    experts = next((config[n] for n in ("num_local_experts", "num_experts", "n_routed_experts") if config.get(n)), 0)
    # gate, up and down; older models have an MLP of two matrices.
    matrices = 2 if config.get("model_type") in ("opt", "gpt2", "gpt_neox", "phi", "falcon", "starcoder2") else 3
    if not experts or not _is_sparse(config, index):
        inner = config.get("intermediate_size") or config.get("ffn_dim") or config.get("n_inner") or 4 * hidden
        return LayerShape(attention + matrices * hidden * inner)
    inner = config.get("moe_intermediate_size") or config.get("intermediate_size")
    if not inner:
        raise ModelShapeError("the model has experts, but neither moe_intermediate_size nor intermediate_size")
    shared = config.get("shared_expert_intermediate_size") or inner * (config.get("n_shared_experts") or 0)
    return LayerShape(
        always=attention + hidden * experts + matrices * hidden * shared,
        expert=matrices * hidden * inner,
        experts=experts,
        experts_per_token=config.get("num_experts_per_tok") or config.get("num_experts_per_token") or 1,
    )


def _is_sparse(config: Mapping[str, Any], index: int) -> bool:
    """Whether layer `index` of a mixture-of-experts model has experts."""
    if index < (config.get("first_k_dense_replace") or 0) or index in (config.get("mlp_only_layers") or ()):
        return False
    step = config.get("decoder_sparse_step") or config.get("moe_layer_freq") or config.get("interleave_moe_layer_step")
    return not isinstance(step, int) or step <= 1 or (index + 1) % step == 0


def _dtype_bytes(config: Mapping[str, Any]) -> float:
    return 4.0 if "32" in str(config.get("dtype") or config.get("torch_dtype") or "bfloat16") else 2.0


def _weight_bytes(config: Mapping[str, Any]) -> float:
    """Bytes a parameter of a layer, by the kinds of quantisation whose width their name gives."""
    quantisation = config.get("quantization_config")
    if not isinstance(quantisation, Mapping):
        return _dtype_bytes(config)
    if isinstance(bits := quantisation.get("bits") or quantisation.get("w_bit"), int):
        return bits / 8
    method = str(quantisation.get("quant_method", "")) + str(quantisation.get("config_groups", ""))
    if "mxfp4" in method or "'num_bits': 4" in method:
        return 0.5
    return 1.0
