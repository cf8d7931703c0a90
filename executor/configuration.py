"""How a vLLM configuration is completed when its executor is HandoffExecutor."""

from __future__ import annotations

from typing import Any

from vllm_handoff.executor.layer_partition import apply_layer_split
from vllm_handoff.executor.refusals import check_supported
from vllm_handoff.scheduler_ext.settings import HandoffSettings

EXECUTOR = "vllm_handoff.executor.HandoffExecutor"
_PACKAGE = EXECUTOR.partition(".")[0] + "."

ASYNC_SCHEDULER = "vllm_handoff.scheduler_ext.scheduler.HandoffScheduler"
SYNC_SCHEDULER = "vllm_handoff.scheduler_ext.scheduler.HandoffSyncScheduler"
GPU_WORKER = "vllm_handoff.worker.gpu_worker.HandoffWorker"
CPU_WORKER = "vllm_handoff.worker.cpu_worker.HandoffCPUWorker"


class HandoffConfigError(ValueError):
    """A configuration that HandoffExecutor cannot run, with the remedy."""


def executor_class_of(backend: Any) -> type | None:
    """HandoffExecutor or a subclass, if `backend` names it by class or path; None for every other backend.

    Only paths into this package are resolved, so that looking at a
    configuration never imports somebody else's executor.
    """
    if isinstance(backend, str) and backend.startswith(_PACKAGE):
        from vllm.utils.import_utils import resolve_obj_by_qualname

        try:
            backend = resolve_obj_by_qualname(backend)
        except (ImportError, AttributeError) as error:
            raise HandoffConfigError(
                f"--distributed-executor-backend {backend!r} does not exist ({error}). The executor is {EXECUTOR}."
            ) from error
    if not isinstance(backend, type):
        return None
    from vllm_handoff.executor.executor import HandoffExecutor

    return backend if issubclass(backend, HandoffExecutor) else None


def uses_handoff(parallel_config: Any) -> bool:
    """Whether this configuration's executor is ours."""
    backend = parallel_config.distributed_executor_backend
    if isinstance(backend, str):
        return backend.startswith(_PACKAGE)
    # Classes of vLLM itself are told apart without importing our executor.
    return isinstance(backend, type) and any(base.__module__.startswith(_PACKAGE) for base in backend.__mro__)


def complete(vllm_config: Any) -> None:
    """Fill in the worker and the scheduler, unless the user named them, and refuse what cannot run.

    Raises:
        HandoffConfigError: the worker or scheduler that the user named cannot
            work, the layers cannot be divided among the stages, or there are too few GPUs.
        UnsupportedFeatureError: the configuration asks for something this release does not run.
        SettingsError: additional_config["handoff"] has a setting that cannot be used.
    """
    check_supported(vllm_config)
    _check_layers(vllm_config)
    settings = HandoffSettings.of(vllm_config)
    _check_gpus(vllm_config.parallel_config, settings)
    apply_layer_split(vllm_config, settings)
    _choose_worker(vllm_config)
    _choose_scheduler(vllm_config)


def _check_gpus(parallel_config: Any, settings: HandoffSettings) -> None:
    """Check that every rank has a GPU: vLLM notices in a worker, by an assertion about its local rank."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda_alike():
        return
    replicas = parallel_config.data_parallel_size_local
    if settings.share_gpu:
        if parallel_config.data_parallel_size > 1:
            raise HandoffConfigError(
                "share_gpu puts the ranks of one engine on one GPU, and --data-parallel-size asks for "
                f"{parallel_config.data_parallel_size} engines: drop one of the two."
            )
        # Between GPUs' memories, by addresses that one GPU has only once.
        parallel_config.disable_custom_all_reduce = True
        return
    assigned = parallel_config.assigned_physical_gpu_ids
    needed = parallel_config.world_size * max(1, replicas)
    found = current_platform.device_count() if assigned is None else len(assigned)
    if needed > found:
        raise HandoffConfigError(
            f"{parallel_config.pipeline_parallel_size} stages of {parallel_config.tensor_parallel_size} ranks"
            f"{f' in {replicas} replicas' if replicas > 1 else ''} need "
            f"{needed} GPUs and {found} can be seen: lower --pipeline-parallel-size or --tensor-parallel-size, or look "
            f"at CUDA_VISIBLE_DEVICES. (To try all ranks on one GPU, slowly: additional_config "
            f'{{"handoff": {{"share_gpu": true}}}}.)'
        )


def _check_layers(vllm_config: Any) -> None:
    """Check that every stage gets a layer, before any worker is started.

    vLLM notices some of this in a worker, and a stage without layers as a
    division by zero when KV space is shared out.
    """
    import vllm.envs as envs

    stages = vllm_config.parallel_config.pipeline_parallel_size
    if stages == 1 or vllm_config.model_config is None:
        return
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    if stages > layers:
        raise HandoffConfigError(
            f"--pipeline-parallel-size {stages} is more than the model has layers ({layers}). "
            f"Set it to {layers} at most."
        )
    partition = envs.VLLM_PP_LAYER_PARTITION
    if partition is None:
        return
    try:
        parts = [int(part) for part in partition.split(",")]
    except ValueError:
        parts = []
    if len(parts) != stages or sum(parts) != layers or min(parts) < 1:
        example = ",".join(["1"] * (stages - 1) + [str(layers - stages + 1)])
        raise HandoffConfigError(
            f"VLLM_PP_LAYER_PARTITION={partition!r} does not fit: {stages} stages need {stages} positive numbers "
            f"that add up to the model's {layers} layers, for instance {example!r}."
        )


def _choose_worker(vllm_config: Any) -> None:
    from vllm.platforms import current_platform

    ours = CPU_WORKER if current_platform.is_cpu() else GPU_WORKER
    named = vllm_config.parallel_config.worker_cls
    # By now the platform has replaced "auto" by its own worker.
    if named in ("auto", "vllm.v1.worker.cpu_worker.CPUWorker", "vllm.v1.worker.gpu_worker.Worker"):
        vllm_config.parallel_config.worker_cls = ours
    elif named != ours:
        from vllm_handoff.worker.mixin import HandoffWorkerMixin

        if not issubclass(_resolve(named, "--worker-cls"), HandoffWorkerMixin):
            raise HandoffConfigError(
                f"--worker-cls {named} cannot obey a manifest. Derive it from {ours}, or leave the flag out."
            )


def _choose_scheduler(vllm_config: Any) -> None:
    config = vllm_config.scheduler_config
    ours = ASYNC_SCHEDULER if config.async_scheduling else SYNC_SCHEDULER
    if config.scheduler_cls is None:
        config.scheduler_cls = ours
        return
    if config.scheduler_cls in (ASYNC_SCHEDULER, SYNC_SCHEDULER):
        config.scheduler_cls = ours
        return
    named = config.scheduler_cls
    cls = named if isinstance(named, type) else _resolve(named, "--scheduler-cls")
    from vllm_handoff.scheduler_ext.manifest_mixin import ManifestMixin

    if vllm_config.parallel_config.pipeline_parallel_size > 1 and not issubclass(cls, ManifestMixin):
        raise HandoffConfigError(
            f"--scheduler-cls {named} writes no manifest, which pipeline stages need. "
            f"Derive it from {ours}, or leave the flag out."
        )


def _resolve(path: str, flag: str) -> type:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    try:
        cls = resolve_obj_by_qualname(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise HandoffConfigError(f"{flag} {path!r} cannot be imported: {error}") from error
    if not isinstance(cls, type):
        raise HandoffConfigError(f"{flag} {path!r} is not a class")
    return cls
