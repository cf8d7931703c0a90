"""Builds vLLM's worker inside a worker process."""

from __future__ import annotations

from multiprocessing.synchronize import Lock
from typing import TYPE_CHECKING, Any

from vllm_handoff.executor.logs import join_vllm_logging
from vllm_handoff.scheduler_ext.settings import HandoffSettings
from vllm_handoff.worker import shared_gpu

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.worker_base import WorkerWrapperBase


def build_vllm_worker(
    vllm_config: VllmConfig,
    rank: int,
    distributed_init_method: str,
    is_driver_worker: bool,
    shared_worker_lock: Lock,
) -> WorkerWrapperBase:
    """Make the worker of one rank, with its device set up and its model loaded.

    Returns vLLM's wrapper: calls go through it, because it applies the
    multi-modal cache before execute_model.
    """
    from vllm import envs
    from vllm.envs import enable_envs_cache
    from vllm.logger import configure_logging
    from vllm.platforms import current_platform
    from vllm.tracing import maybe_init_worker_tracer
    from vllm.utils import numa_utils
    from vllm.v1.executor.vllm_net_devices import set_worker_net_device
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    if logging_config := getattr(vllm_config, "logging_config", None):
        configure_logging(logging_config)
    join_vllm_logging()
    parallel_config = vllm_config.parallel_config
    local_rank = rank
    if current_platform.is_cuda_alike() and HandoffSettings.of(vllm_config).share_gpu:
        shared_gpu.share(rank)
        local_rank = 0
    if parallel_config.assigned_physical_gpu_ids is not None:
        from vllm.platforms.interface import set_assigned_physical_gpu_ids

        # Before set_worker_net_device, which looks the device up.
        set_assigned_physical_gpu_ids(parallel_config.assigned_physical_gpu_ids)
    set_worker_net_device(local_rank, vllm_config)
    maybe_init_worker_tracer(
        instrumenting_module_name="vllm.worker", process_kind="worker", process_name=f"Worker_{rank}"
    )

    from vllm_handoff.worker.shared_gloo import share_gloo_device

    worker = WorkerWrapperBase(rpc_rank=rank, global_rank=rank)
    all_kwargs: list[dict[str, Any]] = [{} for _ in range(parallel_config.world_size)]
    all_kwargs[rank] = {
        "vllm_config": vllm_config,
        "local_rank": local_rank,
        "rank": rank,
        "distributed_init_method": distributed_init_method,
        "is_driver_worker": is_driver_worker,
        "shared_worker_lock": shared_worker_lock,
    }
    worker.init_worker(all_kwargs)
    _name_process(vllm_config)
    if current_platform.is_cpu():
        share_gloo_device()
    worker.init_device()
    # The groups exist now, and with them the stage that goes into the name.
    _name_process(vllm_config)
    if envs.VLLM_ELASTIC_EP_SCALE_UP_LAUNCH:
        worker.elastic_ep_execute("load_model")
    else:
        worker.load_model()
    current_platform.update_block_size_for_backend(vllm_config)
    if parallel_config.numa_bind:
        numa_utils.log_current_affinity_state(f"Worker_{rank}")
    # Nothing changes the environment after this point.
    enable_envs_cache()
    return worker


def _name_process(vllm_config: VllmConfig) -> None:
    from vllm.v1.executor.multiproc_executor import WorkerProc

    WorkerProc.setup_proc_title_and_log_prefix(enable_ep=vllm_config.parallel_config.enable_expert_parallel)
