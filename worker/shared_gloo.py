"""One gloo device for all process groups of a worker."""

from __future__ import annotations

from datetime import timedelta
from typing import Any


def share_gloo_device() -> None:
    """Make the process groups created from here on share one gloo device.

    Why: every gloo device has a thread that wakes up a hundred times a second,
    idle or not. PyTorch makes a device for each group, and vLLM a dozen groups
    in each worker: an idle engine took 3% of a core.
    How: PyTorch finds the class by this name when it makes a group; ours is the
    same class, given one device instead of asking for a new one.
    For torch 2.13. Can go once PyTorch shares devices.
    """
    from torch.distributed import distributed_c10d

    original: Any = distributed_c10d.ProcessGroupGloo
    if getattr(original, "_shares_device", False):
        return
    device = original.create_default_device()

    class ProcessGroupGloo(original):  # type: ignore[misc]
        _shares_device = True

        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta = timedelta(minutes=30)) -> None:
            options = original._Options()
            options._devices = [device]
            options._timeout = timeout
            options._threads = 2  # PyTorch's own number
            super().__init__(store, rank, size, options)

    ProcessGroupGloo.__module__ = original.__module__
    distributed_c10d.ProcessGroupGloo = ProcessGroupGloo  # type: ignore[misc]
