"""What `vllm-handoff doctor` looks at in the installation and the operating system."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

from vllm_handoff.executor.show_version import plugin_problem
from vllm_handoff.executor.version import SUPPORTED_RANGE, UnsupportedVllmError, check_vllm_version

# Sockets, pipes and shared memory of an engine and its workers, with room for a thousand connections of clients.
_DESCRIPTORS = 4096
_DESCRIPTORS_AT_LEAST = 1024
# NCCL takes tens of MB a GPU, PyTorch's and vLLM's own segments a little more.
_SHM_BYTES_EACH = 256 << 20
_SOCKET_PATH = 107
# The folder of an executor, and the longest socket name in it.
_SOCKET_TAIL = len("/vllm-handoff-xxxxxxxx/commands")


class Check(NamedTuple):
    """One finding: what was looked at, how it is, and what to do about it if something is wrong."""

    name: str
    level: Literal["ok", "note", "fail"]
    found: str
    remedy: str = ""


def versions() -> Iterator[Check]:
    """vLLM, torch, Python and the plugin."""
    try:
        yield Check("vLLM", "ok", f"{check_vllm_version()} (supported: {SUPPORTED_RANGE})")
    except UnsupportedVllmError as error:
        yield Check("vLLM", "fail", "missing or not supported", str(error))
    for name, distribution in (("vllm-handoff", "vllm-handoff"), ("torch", "torch")):
        try:
            yield Check(name, "ok", version(distribution))
        except PackageNotFoundError:
            yield Check(name, "fail", "not installed", f"pip install {distribution}")
    yield Check("Python", "ok", f"{sys.version.split()[0]}, {sys.executable}")
    allowed = os.environ.get("VLLM_PLUGINS")
    setting = "VLLM_PLUGINS is not set" if allowed is None else f"VLLM_PLUGINS={allowed}"
    if problem := plugin_problem():
        yield Check("plugin", "fail", f"vLLM would not load it ({setting})", problem)
    else:
        yield Check("plugin", "ok", f"vLLM will load it ({setting})")


def limits(workers: int) -> Iterator[Check]:
    """Shared memory, limits of the process, and room for the sockets' path."""
    yield _shared_memory(workers)
    yield _descriptors()
    yield _locked_memory()
    yield socket_path(tempfile.gettempdir())


def _shared_memory(workers: int) -> Check:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError as error:
        return Check("/dev/shm", "fail", f"not there ({error})", "mount a tmpfs on /dev/shm: NCCL and gloo need it.")
    needed = _SHM_BYTES_EACH * workers
    found = f"{_size(usage.free)} free of {_size(usage.total)}"
    if usage.total < needed:
        remedy = f"{_size(needed)} for {workers} workers: docker run --shm-size {needed >> 20}m (or --ipc host)."
        # Docker's default is 64 MB, which NCCL overruns with a bus error.
        return Check("/dev/shm", "fail" if usage.total <= 64 << 20 else "note", found, remedy)
    if usage.free < needed:
        return Check("/dev/shm", "note", found, "Something fills it: look at /dev/shm for what ended servers left.")
    return Check("/dev/shm", "ok", found)


def _descriptors() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{_limit(soft)} open files (at most {_limit(hard)})"
    remedy = f"raise it to {_DESCRIPTORS}: ulimit -n, LimitNOFILE= in a unit, ulimits.nofile in a compose file."
    if soft != resource.RLIM_INFINITY and soft < _DESCRIPTORS:
        return Check("nofile", "fail" if soft < _DESCRIPTORS_AT_LEAST else "note", found, remedy)
    return Check("nofile", "ok", found)


def _locked_memory() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = f"{_limit(soft, size=True)} of memory may be locked"
    if soft == resource.RLIM_INFINITY or soft >= 1 << 30:
        return Check("memlock", "ok", found)
    return Check(
        "memlock",
        "note",
        found,
        "Only transfers over InfiniBand need it unlimited: ulimit -l, LimitMEMLOCK=infinity, ulimits.memlock: -1.",
    )


def socket_path(folder: str) -> Check:
    """Whether the sockets' path fits into what the kernel takes."""
    length = len(folder.encode()) + _SOCKET_TAIL
    if not os.access(folder, os.W_OK | os.X_OK):
        return Check("sockets", "fail", f"{folder} cannot be written to", "set TMPDIR to a folder that can.")
    if length <= _SOCKET_PATH:
        return Check("sockets", "ok", f"{folder} (path of {length} bytes, at most {_SOCKET_PATH})")
    found = f"{folder} makes a path of {length} bytes, the kernel takes {_SOCKET_PATH}"
    if os.access("/tmp", os.W_OK | os.X_OK):
        return Check("sockets", "note", found, "/tmp is used instead; a shorter TMPDIR avoids that.")
    return Check("sockets", "fail", found, "set TMPDIR to a shorter path.")


def processors(workers: int) -> Iterator[Check]:
    """Processor cores and memory nodes."""
    cores = len(os.sched_getaffinity(0))
    quota = _quota()
    found = f"{cores} usable" + (f", limited to {quota:g} by the control group" if quota else "")
    usable = min(cores, quota) if quota else cores
    wanted = workers + 2
    if usable < wanted:
        yield Check(
            "CPU cores", "note", found, f"{wanted} keep {workers} workers, the engine and the server from waiting."
        )
    else:
        yield Check("CPU cores", "ok", found)
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    if nodes > 1:
        yield Check("NUMA", "note", f"{nodes} nodes", "vllm serve --numa-bind keeps each worker beside its GPU.")
    else:
        yield Check("NUMA", "ok", "1 node")


def _quota(path: Path = Path("/sys/fs/cgroup/cpu.max")) -> float | None:
    try:
        quota, period = path.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 1 << 30 else f"{count >> 20} MiB"


def _limit(value: int, size: bool = False) -> str:
    if value == resource.RLIM_INFINITY:
        return "any amount" if size else "any number of"
    return _size(value) if size else str(value)
