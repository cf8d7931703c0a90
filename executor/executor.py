"""HandoffExecutor: vLLM's executor interface on this package's control plane."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm.envs as envs
from vllm.platforms import current_platform
from vllm.utils import numa_utils
from vllm.utils.network_utils import (
    aiter_requires_tcp_store,
    get_distributed_init_method,
    get_loopback_ip,
    get_open_port,
)
from vllm.utils.system_utils import get_mp_context
from vllm.utils.torch_utils import set_torch_threads_for_runtime
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import set_multiprocessing_worker_envs
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from vllm_handoff.executor import board, plugin, stats
from vllm_handoff.executor.control_plane import ControlPlane
from vllm_handoff.executor.cpu_threads import worker_environment
from vllm_handoff.executor.front_end import end_with_front_end
from vllm_handoff.executor.host_pace import HostPace
from vllm_handoff.executor.logs import join_vllm_logging
from vllm_handoff.executor.messages import ALL_RANKS
from vllm_handoff.executor.rounds import RoundDispatcher
from vllm_handoff.executor.stats import RoundStats
from vllm_handoff.executor.version import check_vllm_version
from vllm_handoff.scheduler_ext.settings import HandoffSettings
from vllm_handoff.scheduler_ext.stage_time import keep_pace, keep_stage_times
from vllm_handoff.worker.vllm_worker import build_vllm_worker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

logger = logging.getLogger(__name__)

_HEALTH_CHECK_S = 10.0


class HandoffExecutor(Executor):
    """Runs one worker process a rank, on this host, with several rounds in flight.

    Raises when constructed:
        UnsupportedVllmError: the installed vLLM is not supported.
        ValueError: the configuration spans several hosts.
        WorkerStartError: a worker could not start; the message has its traceback.
    """

    supports_pp = True
    _starting = False

    def __init__(self, vllm_config: VllmConfig) -> None:
        self._vllm_version = check_vllm_version()
        plugin.require_loaded()
        join_vllm_logging()
        super().__init__(vllm_config)

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _init_executor(self) -> None:
        # What the control plane keeps must not refer to this object, or it would live until exit.
        vllm_config, parallel = self.vllm_config, self.parallel_config
        if parallel.nnodes > 1:
            raise ValueError(
                f"vllm-handoff runs all workers on one host, and nnodes is {parallel.nnodes}; "
                "use --distributed-executor-backend mp."
            )
        stage_size = parallel.tensor_parallel_size * parallel.prefill_context_parallel_size
        world_size = parallel.world_size
        set_multiprocessing_worker_envs(world_size * max(1, parallel.data_parallel_size_local))
        context = get_mp_context()
        shared_worker_lock = context.Lock()
        environment = worker_environment(self.vllm_config)

        @contextmanager
        def start_environment(rank: int):  # type: ignore[no-untyped-def]
            with environment(rank), numa_utils.configure_subprocess(vllm_config, rank, process_kind="worker"):
                yield

        def build_kwargs(rank: int) -> dict[str, Any]:
            return {
                "vllm_config": vllm_config,
                "rank": rank,
                "distributed_init_method": init_method,
                "is_driver_worker": rank % parallel.tensor_parallel_size == 0,
                "shared_worker_lock": shared_worker_lock,
            }

        self._plane = ControlPlane(
            world_size,
            stage_size,
            build_vllm_worker,
            build_kwargs,
            context,
            start_environment,
            HandoffSettings.of(vllm_config).stall_seconds,
        )
        self._finalizer = weakref.finalize(self, self._plane.close)
        if aiter_requires_tcp_store():
            init_method = get_distributed_init_method(get_loopback_ip(), get_open_port())
        else:
            init_method = self._plane.folder.rendezvous
        self._log_start(world_size // stage_size)
        end_with_front_end(self._plane.close)
        self._plane.start()
        self._plane.folder.unlink_shared_memory()
        # This process only schedules: threads of its own would compete with the workers.
        set_torch_threads_for_runtime()
        samples = self.model_config.runner_type != "pooling" and not self.vllm_config.is_mm_encoder_only
        self._output_rank = world_size - stage_size
        self._rounds = RoundDispatcher(
            self._plane,
            self._output_rank,
            samples,
            EMPTY_MODEL_RUNNER_OUTPUT,
            timeout=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS,
            publish=self._open_board(),
            depth=self.vllm_config.max_concurrent_batches,
        )
        self._stats_written = False
        # Of the adapters that the workers have loaded, by id: the path, and whether it is one in this file system.
        self._adapters: dict[int, tuple[str, bool]] = {}
        # Until the workers are warm, a call that fails ends them: the engine is not made, and nobody would.
        self._starting = True

    def _open_board(self) -> Callable[[RoundStats], None]:
        """Where the counts of rounds go, readable from other processes."""
        folder = self._plane.folder.path
        writer = board.Board(Path(folder) / board.ENGINE_BOARD, RoundStats())
        instance, index = self.vllm_config.instance_id, self.parallel_config.data_parallel_index
        names = (instance, board.engine_name(instance, index), board.sibling_name(index))
        board.announce(folder, *filter(None, names))
        return writer.write

    def _log_start(self, stages: int) -> None:
        logger.info(
            "vllm-handoff %s on vLLM %s: %d stages x TP %d, depth %d, transport %s, %s scheduling.",
            version("vllm-handoff"),
            self._vllm_version,
            stages,
            self.parallel_config.tensor_parallel_size,
            self.vllm_config.max_concurrent_batches,
            "gloo" if current_platform.is_cpu() else "NCCL",
            "asynchronous" if self.scheduler_config.async_scheduling else "synchronous",
        )

    def execute_model(  # type: ignore[override]
        self, scheduler_output: SchedulerOutput, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput | None] | None:
        future = self._rounds.execute_model(scheduler_output, self._aggregate())
        return future if non_block else future.result()

    def sample_tokens(  # type: ignore[override]
        self, grammar_output: GrammarOutput | None, non_block: bool = False
    ) -> ModelRunnerOutput | Future[ModelRunnerOutput]:
        future = self._rounds.sample_tokens(grammar_output)
        return future if non_block else future.result()

    def _aggregate(self) -> Callable[[list[Any]], Any] | None:
        aggregators = [a for a in (self.kv_output_aggregator, self.ec_output_aggregator) if a is not None]
        if not aggregators:
            return None

        def aggregate(outputs: list[Any]) -> Any:
            # Each merges its connector's part into the output rank's output.
            for aggregator in aggregators:
                outputs[self._output_rank] = aggregator.aggregate(outputs, output_rank=self._output_rank)
            return outputs[self._output_rank]

        return aggregate

    def compile_or_warm_up_model(self) -> None:
        """Warm the workers up, then measure what a round costs each stage, for the scheduler made next."""
        super().compile_or_warm_up_model()
        if self.parallel_config.pipeline_parallel_size > 1 and self.model_config.runner_type != "pooling":
            ranks = self.collective_rpc("handoff_stage_times")
            keep_stage_times(self.vllm_config, ranks, self._plane.stage_size)
            keep_pace(self.vllm_config, HostPace(self._plane.folder.path, len(ranks)))
        self._starting = False

    def execute_dummy_batch(self) -> None:
        self.collective_rpc(
            "execute_dummy_batch",
            timeout=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS,
            unique_reply_rank=self._output_rank,
        )

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        if self.parallel_config.pipeline_parallel_size > 1:
            # They came with the outputs: the scheduler has them.
            return None
        return self.collective_rpc(
            "take_draft_token_ids",
            timeout=envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS,
            unique_reply_rank=self._output_rank,
        )

    def collective_rpc(  # type: ignore[override]
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
    ) -> Any:
        """Call a worker method, or a callable that takes the worker first, on every worker.

        Returns:
            The results in rank order, or the one of `unique_reply_rank`; a
            future of that if `non_block`.

        Raises:
            TimeoutError: not all replies came within `timeout` seconds.
            RuntimeError: the call raised on a worker (with its traceback; the
                executor goes on working), or the executor has failed.
        """
        if unique_reply_rank is None:
            reply_rank, combine = ALL_RANKS, _in_rank_order
        else:
            reply_rank, combine = unique_reply_rank, _only_result
        future = self._plane.call(method, args, kwargs, reply_rank, combine, timeout)
        if non_block:
            return future
        try:
            return future.result()
        except Exception:
            if self._starting:
                self._plane.close(grace=0)
            raise

    def load_adapter(self, lora_request: LoRARequest) -> None:
        """Have every worker load an adapter, unless they have and it is still where it was.

        Raises:
            WorkerCallError: it cannot be loaded; the message says where and why.
        """
        path = lora_request.lora_path
        loaded, was_here = self._adapters.get(lora_request.lora_int_id, (None, False))
        is_here = Path(path).exists()
        # A worker that has dropped it for others loads it again, so a folder has to be there still.
        # A name in a model hub never is one: asking the workers each time would hold up every request.
        if loaded != path or lora_request.load_inplace or (was_here and not is_here):
            self.add_lora(lora_request)
            self._adapters[lora_request.lora_int_id] = path, is_here

    def check_health(self) -> None:
        self.collective_rpc("check_health", timeout=_HEALTH_CHECK_S)

    def register_failure_callback(self, callback: Callable[[], None]) -> None:
        def failed() -> None:
            self._rounds.note_fault()
            callback()

        self._plane.register_failure_callback(failed)

    def stats(self) -> RoundStats:
        """Counts of the rounds so far."""
        return self._rounds.stats

    def shutdown(self) -> None:
        """End the workers. Can be called again; takes seconds at most, whatever the workers do."""
        plane = getattr(self, "_plane", None)
        if plane is None:
            return
        plane.close(grace=envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS)
        if not getattr(self, "_stats_written", True):
            self._stats_written = True
            stats.write_if_asked(self._rounds.stats)


def _in_rank_order(results: dict[int, Any]) -> list[Any]:
    return [results[rank] for rank in sorted(results)]


def _only_result(results: dict[int, Any]) -> Any:
    (result,) = results.values()
    return result
