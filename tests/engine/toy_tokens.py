"""What the toy model is to answer, in whole numbers; and its folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ARCHITECTURE = "HandoffToyForCausalLM"
VOCABULARY = 4096
HEAD_SIZE = 32


def mix(last: Any, position: Any, first: Any, total: Any) -> Any:
    """The next token, before it is brought into the vocabulary.

    Args:
        last: the newest token.
        position: its position.
        first: the request's first token.
        total: the sum of the request's tokens so far.
    """
    return 3 * last + 5 * position + 31 * first + 7 * total + 11


def continuation(prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """The next `count` tokens after `prompt`."""
    tokens = list(prompt)
    total = sum(tokens)
    for _ in range(count):
        tokens.append(mix(tokens[-1], len(tokens) - 1, tokens[0], total) % VOCABULARY)
        total += tokens[-1]
    return tuple(tokens[len(prompt) :])


def write_folder(folder: Path, context: int) -> Path:
    """A model folder for vLLM; there are no weights in it."""
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": HEAD_SIZE,
        "intermediate_size": HEAD_SIZE,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": HEAD_SIZE,
        "num_hidden_layers": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": context,
        "dtype": "float32",
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
