"""How many threads, and which cores, each worker of a CPU deployment gets."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ForRank = Callable[[int], contextlib.AbstractContextManager]


def worker_environment(vllm_config: VllmConfig) -> ForRank:
    """For each rank, a context that sets the variables its process must start with.

    vLLM's own binding gives each worker one NUMA node and asserts that there
    are enough. A pipeline on one node has more workers than nodes, so with the
    setting "auto" the allowed cores are shared evenly instead. Any other setting
    of VLLM_CPU_OMP_THREADS_BIND is vLLM's to carry out.
    """
    from vllm import envs
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return lambda rank: contextlib.nullcontext()
    workers = vllm_config.parallel_config.local_world_size
    if envs.VLLM_CPU_OMP_THREADS_BIND == "auto":
        from vllm.utils.cpu_resource_utils import get_visible_memory_node

        if len(get_visible_memory_node()) < workers:
            return share_cores(sorted(os.sched_getaffinity(0)), workers)
    from vllm.utils.ompmultiprocessing import OMPProcessManager

    manager = OMPProcessManager(vllm_config)
    return lambda rank: manager.configure_omp_envs(rank=rank, local_rank=rank)


def share_cores(cores: list[int], workers: int) -> ForRank:
    """Share `cores` evenly among `workers`: the number of threads, and their places.

    A user's OMP_NUM_THREADS is left alone, and then nothing is pinned. Nothing
    is pinned either if a worker gets less than two cores: its control-plane
    threads would have to share the one that computes.
    """
    share = len(cores) // workers

    @contextlib.contextmanager
    def environment(rank: int) -> Iterator[None]:
        if "OMP_NUM_THREADS" in os.environ:
            yield
            return
        added = {"OMP_NUM_THREADS": str(max(1, share))}
        if share >= 2 and not {"OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"} & os.environ.keys():
            mine = cores[rank * share : (rank + 1) * share]
            added["OMP_PLACES"] = "{" + ",".join(map(str, mine)) + "}"
            added["OMP_PROC_BIND"] = "true"
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)

    return environment
