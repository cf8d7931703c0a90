"""What every test starts from: an environment for small machines, and the models."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# Set before anything imports torch or vLLM, so that plain `pytest` behaves like `make test`.
ENVIRONMENT = {
    # Two stages share a few cores, and fork is only safe while no thread pool runs.
    "OMP_NUM_THREADS": "1",
    # A spawned process imports torch and vLLM again, 13 to 15 s each.
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)


# A shell that runs the tests in the background makes them ignore Ctrl-C, and some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _model(name: str) -> Path:
    import models

    return models.get(name, say=print)


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """Folder of a four-layer Llama with random weights (512 tokens, context 1024)."""
    return _model("tiny-llama")


@pytest.fixture(scope="session")
def tiny_qwen3() -> Path:
    """Folder of a four-layer Qwen3 with random weights (512 tokens, context 1024)."""
    return _model("tiny-qwen3")


@pytest.fixture(scope="session")
def tiny_mtp() -> Path:
    """Folder of a four-layer MiMo with a layer that proposes tokens, random weights (512 tokens, context 1024)."""
    return _model("tiny-mtp")


@pytest.fixture(scope="session")
def tiny_audio() -> Path:
    """Folder of a four-layer Qwen2-Audio with random weights (512 tokens, context 1024)."""
    return _model("tiny-audio")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of SmolLM2-135M-Instruct. The first use downloads 93 MB and takes about two minutes."""
    return _model("smollm2-135m")
