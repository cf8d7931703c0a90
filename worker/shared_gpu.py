"""All ranks on one GPU, so that stages and NCCL can be tried on a machine that has no more."""

from __future__ import annotations

import os


def share(rank: int) -> None:
    """Prepare this process, one rank of several on one GPU. Before anything imports NCCL or initialises CUDA.

    NCCL refuses two ranks on one device of a host. With a host id of its own
    each rank stands for another host, and NCCL goes between them by sockets:
    the same calls, kernels, streams and waits as between two GPUs, at a
    fraction of the speed.
    """
    os.environ["NCCL_HOSTID"] = f"vllm-handoff-{rank}"
    # Nothing leaves the machine.
    os.environ["NCCL_NET"] = "Socket"
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    # vLLM's all-reduce over symmetric memory, which takes a GPU for each rank.
    os.environ["VLLM_ALLREDUCE_USE_SYMM_MEM"] = "0"
