"""The loads, and the model shapes they run on."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from pathlib import Path

# A Llama of about 8 billion parameters. With load_format="dummy" a config.json is all it takes.
SHAPES: dict[str, dict] = {
    "8b": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=14336,
        num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=128256,
        max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=500000.0, hidden_act="silu",
        tie_word_embeddings=False, torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2, attention_bias=False,
    ),
    "1b": dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=2048, intermediate_size=8192,
        num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64, vocab_size=128256,
        max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=500000.0, hidden_act="silu",
        tie_word_embeddings=False, torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2, attention_bias=False,
    ),
}  # fmt: skip

# Two stages of this are two of the four stages of the 8B.
SHAPES["8b-half"] = SHAPES["8b"] | {"num_hidden_layers": 16}

STANDARD = ("1x128+128", "8x128+128", "64x512+128", "256x32+256", "256x512+128", "256x2048+64")


def write_shape(name: str, folder: Path) -> Path:
    """A model folder for a shape, config only."""
    target = folder / f"shape-{name}"
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps(SHAPES[name], indent=1))
    return target


@dataclass(frozen=True)
class Load:
    """`requests` prompts of `prompt` tokens, each answered with `generated` tokens, all at once."""

    requests: int
    prompt: int
    generated: int

    @classmethod
    def parse(cls, text: str) -> Load:
        """From the form 64x512+128.

        Raises:
            ValueError: another form.
        """
        match = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text)
        if not match:
            raise ValueError(f"a load is written REQUESTSxPROMPT+GENERATED, such as 64x512+128, not {text!r}")
        return cls(*(int(part) for part in match.groups()))

    def __str__(self) -> str:
        return f"{self.requests}x{self.prompt}+{self.generated}"

    def prompts(self, vocab: int, seed: int = 0) -> list[list[int]]:
        """Token-id prompts, the same for the same seed."""
        rng = random.Random(f"{self}-{seed}")
        return [[rng.randrange(10, vocab - 10) for _ in range(self.prompt)] for _ in range(self.requests)]


@dataclass(frozen=True)
class OnlineLoad:
    """Requests that arrive one by one, at random times (Poisson), with prompts of mixed length.

    Args:
        rate: requests a second; 0 for all at once, which shows throughput at saturation.
        requests: how many.
        shortest, longest: prompt lengths, drawn log-uniformly.
        generated: tokens of each answer.
    """

    rate: float
    requests: int = 200
    shortest: int = 32
    longest: int = 4096
    generated: int = 128

    def __str__(self) -> str:
        return f"online {self.rate:g}/s x {self.requests}"

    def arrivals(self, seed: int = 0) -> list[tuple[float, int]]:
        """(seconds after the start, prompt length) of each request."""
        rng = random.Random(f"{self}-{seed}")
        now, found = 0.0, []
        for _ in range(self.requests):
            now += rng.expovariate(self.rate) if self.rate else 0.0
            length = int(self.shortest * (self.longest / self.shortest) ** rng.random())
            found.append((now, length))
        return found
