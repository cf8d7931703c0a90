"""What the toy model is to answer, in whole numbers; and its folder. Imports neither torch nor vLLM."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ARCHITECTURE = "HandoffStressToyForCausalLM"
# A prime, so that no difference between two histories is multiplied away.
VOCABULARY = 4093
HEAD_SIZE = 64
# Ends an answer unless ignore_eos is set.
END_TOKEN = 2
# The logits fall by this much from a token to the next in the ring, starting at the one that is due: so much that
# neither temperature nor penalties of a sane size let chance decide, and few enough that float32 holds them exactly.
GAP = 64.0
# `seen` is a number below this.
SEEN = 1 << 18
# Tokens that are one character in the toy's tokenizer, for grammars: a to z.
FIRST_LETTER = 100
LETTERS = range(FIRST_LETTER, FIRST_LETTER + 26)


def looked_at(layer: int, position: int) -> int:
    """The earlier position whose token layer `layer` reads, from the KV cache, at `position`."""
    if layer == 0:
        return 0  # the request's first token: whose cache is this?
    return (position * 2_654_435_761 + layer * 40_503) % (position + 1)


def fold(seen: Any, read: Any) -> Any:
    """What a layer makes of `seen`, which came from the layer before, and the token that it read."""
    return (31 * seen + read + 1) % SEEN


def mix(last: Any, position: Any, seen: Any) -> Any:
    """The next token.

    Args:
        last: the newest token.
        position: its position.
        seen: what all layers have read from the KV cache.
    """
    return (3 * last + 5 * position + 31 * seen + 11) % VOCABULARY


def next_token(tokens: Sequence[int], layers: int) -> int:
    """The token that is due after `tokens`."""
    position, seen = len(tokens) - 1, 0
    for layer in range(layers):
        seen = fold(seen, tokens[looked_at(layer, position)])
    return mix(tokens[-1], position, seen)


def first_in_ring(due: int, allowed: Sequence[int]) -> int:
    """The likeliest of `allowed` when `due` is due."""
    return min(allowed, key=lambda token: (token - due) % VOCABULARY)


def choose(due: int, tokens: Sequence[int], prompt_length: int, params: dict[str, Any]) -> int:
    """The token that these sampling parameters make of the due one, after `tokens`.

    Knows allowed_token_ids, logit_bias, min_tokens and the penalties; the rest
    (temperature, top_k, top_p, min_p, seed) cannot change the outcome.
    """
    scores = GAP * (VOCABULARY - (np.arange(VOCABULARY) - due) % VOCABULARY).astype(np.float64)
    output = tokens[prompt_length:]
    if "allowed_token_ids" in params:
        allowed = params["allowed_token_ids"]
        kept = scores[allowed].copy()
        scores[:] = -np.inf
        scores[allowed] = kept
    for token, bias in params.get("logit_bias", {}).items():
        scores[int(token)] += bias
    if len(output) < params.get("min_tokens", 0):
        scores[params.get("stop_token_ids", [])] = -np.inf
        if not params.get("ignore_eos", False):
            scores[END_TOKEN] = -np.inf
    if (repetition := params.get("repetition_penalty", 1.0)) != 1.0:
        for token in set(tokens):
            scores[token] = scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
    frequency, presence = params.get("frequency_penalty", 0.0), params.get("presence_penalty", 0.0)
    if frequency or presence:
        for token in set(output):
            scores[token] -= frequency * list(output).count(token) + presence
    return int(scores.argmax())


_PLAIN = ("allowed_token_ids", "logit_bias", "min_tokens", "repetition_penalty", "frequency_penalty",
          "presence_penalty")  # fmt: skip


def answer(prompt: Sequence[int], params: dict[str, Any], layers: int, context: int) -> tuple[list[int], str]:
    """The whole answer to a request, and why it ends.

    Args:
        params: SamplingParams as a dict, and "letters" instead of structured_outputs: the length of the word
            that the grammar asks for.
        context: the most tokens that prompt and answer may have together.
    """
    tokens, plain = list(prompt), not any(name in params for name in _PLAIN)
    stops = set(params.get("stop_token_ids", ()))
    if not params.get("ignore_eos", False):
        stops.add(END_TOKEN)
    limit = min(params["max_tokens"], context - len(prompt))
    while True:
        due, count = next_token(tokens, layers), len(tokens) - len(prompt)
        if (letters := params.get("letters")) is not None:
            token = first_in_ring(due, LETTERS) if count < letters else END_TOKEN
        else:
            token = due if plain else choose(due, tokens, len(prompt), params)
        tokens.append(token)
        count += 1
        if token in stops and count >= params.get("min_tokens", 0):
            return tokens[len(prompt) :], "stop"
        if count >= limit:
            return tokens[len(prompt) :], "length"


def write_folder(folder: Path, layers: int, context: int) -> Path:
    """A model folder for vLLM, with a tokenizer; there are no weights in it."""
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": HEAD_SIZE,
        "intermediate_size": HEAD_SIZE,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD_SIZE,
        "num_hidden_layers": layers,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": context,
        "bos_token_id": 1,
        "eos_token_id": END_TOKEN,
        "dtype": "bfloat16",
    }
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer()))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<1>",
        "eos_token": "<2>",
        "unk_token": "<0>",
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


def _tokenizer() -> dict[str, Any]:
    names = {f"<{token}>": token for token in range(VOCABULARY) if token not in LETTERS}
    names |= {chr(ord("a") + token - FIRST_LETTER): token for token in LETTERS}
    special = [
        {"id": token, "content": f"<{token}>", "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": True}
        for token in range(3)
    ]  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "<[0-9]+>|[a-z]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": names, "unk_token": "<0>"},
    }
