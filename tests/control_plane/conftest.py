"""Every test here must leave nothing behind: no process, no descriptor, no folder."""

from __future__ import annotations

import gc
import multiprocessing
import tempfile
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from fake_worker import wait_for


def _folders() -> set[str]:
    return {path.name for path in Path(tempfile.gettempdir()).glob("vllm-handoff-*")}


def _descriptors() -> set[str]:
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found.add(f"{fd.name} {fd.readlink()}")
        except OSError:
            # The descriptor of the listing itself.
            continue
    return found


@pytest.fixture(autouse=True)
def no_leftovers(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    # pytest's own folder must not be made inside ours.
    tmp_path_factory.getbasetemp()
    # Folders of its own: other engines of this machine come and go meanwhile.
    short = tempfile.mkdtemp(prefix="plane-", dir="/tmp")
    monkeypatch.setattr(tempfile, "tempdir", short)
    # Spawning starts it once for this process, and it stays.
    resource_tracker.ensure_running()
    gc.collect()
    descriptors, threads = _descriptors(), set(threading.enumerate())
    yield
    gc.collect()
    assert not multiprocessing.active_children()
    assert not _folders()
    # zmq's own threads close their descriptors a moment after the context's end.
    assert wait_for(lambda: _descriptors() <= descriptors, 10), f"left open: {_descriptors() - descriptors}"
    assert wait_for(lambda: set(threading.enumerate()) <= threads, 10)
    Path(short).rmdir()
