"""Every patch of vLLM, one function each: what it changes, why, for which versions, and when it can go.

All apply to vLLM 0.32.x. Each wraps one method, calls the original, and acts
only on configurations whose executor is HandoffExecutor. They are idempotent:
a wrapper carries a mark, and wrapping a marked method does nothing. Those of
vLLM's server are in server_patches.py.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

_MARK = "_vllm_handoff_patch"


def apply() -> None:
    """Apply all patches in this process."""
    _accept_dotted_path()
    _run_v2_without_triton()
    _complete_configuration()
    _set_depth()
    _refuse_what_does_not_fit()
    _load_adapters_at_the_door()
    _publish_metrics()


def refuse(error: Exception) -> None:
    """Instead of all patches: raise `error` for configurations that name our executor.

    Why: HandoffExecutor refuses an unsupported vLLM itself, but with pipeline
    parallelism vLLM refuses the executor before that, in words that explain nothing.
    """
    from vllm.engine.arg_utils import EngineArgs

    from vllm_handoff.executor.configuration import uses_handoff

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def check(self: Any) -> Any:
            if uses_handoff(self):
                raise error
            return original(self)

        return _mark(check)

    # Another vLLM may not have it.
    if "_check_feature_supported" in EngineArgs.__dict__:
        _wrap(EngineArgs, "_check_feature_supported", make)


def _wrap(owner: type, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
    """Replace owner.name by make(original), once."""
    original = owner.__dict__[name]
    if getattr(original, _MARK, False) or getattr(getattr(original, "fget", None), _MARK, False):
        return
    setattr(owner, name, make(original))


def _mark(function: Any) -> Any:
    setattr(function, _MARK, True)
    return function


def _accept_dotted_path() -> None:
    """Let vLLM's check of features see the executor class behind a dotted path.

    Why: with pipeline parallelism vLLM 0.32 asks the value of
    --distributed-executor-backend for its `supports_pp`, and a string has none,
    so any custom executor given by path is refused.
    How: the path of our executor (no other) becomes the class; the check runs unchanged.
    Can go: once vLLM resolves the path before it checks.
    """
    from vllm.engine.arg_utils import EngineArgs

    from vllm_handoff.executor.configuration import executor_class_of

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def check(self: Any) -> Any:
            backend = executor_class_of(self.distributed_executor_backend)
            if backend is not None:
                self.distributed_executor_backend = backend
            return original(self)

        return _mark(check)

    _wrap(EngineArgs, "_check_feature_supported", make)


@contextlib.contextmanager
def _config_believes_in_triton() -> Iterator[None]:
    import vllm.config.vllm as module

    before, module.HAS_TRITON = module.HAS_TRITON, True
    try:
        yield
    finally:
        module.HAS_TRITON = before


def _run_v2_without_triton() -> None:
    """Let the V2 model runner be chosen on a CPU although Triton does not run there.

    Why: vLLM 0.32 ties the V2 runner to Triton. On a CPU our workers register
    native versions of the kernels through `register_kernels`, so nothing is missing.
    How: the two places that ask for Triton are told that it is there, for our
    configurations on a CPU alone; every other condition is still checked.
    Can go: once vLLM runs V2 on a CPU by itself.
    """
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    from vllm_handoff.executor.configuration import uses_handoff

    if not current_platform.is_cpu():
        return

    def make_property(original: Any) -> property:
        getter = original.fget

        @functools.wraps(getter)
        def use_v2_model_runner(self: Any) -> bool:
            if not uses_handoff(self.parallel_config):
                return getter(self)
            with _config_believes_in_triton():
                return getter(self)

        return property(_mark(use_v2_model_runner))

    def make_method(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def validate(self: Any) -> Any:
            if not uses_handoff(self.parallel_config):
                return original(self)
            with _config_believes_in_triton():
                return original(self)

        return _mark(validate)

    _wrap(VllmConfig, "use_v2_model_runner", make_property)
    _wrap(VllmConfig, "_validate_v2_model_runner", make_method)


def _complete_configuration() -> None:
    """Choose our worker and scheduler, refuse what cannot run yet, and keep async scheduling on a CPU.

    Why: the flag alone has to be enough; vLLM's CPU platform switches async
    scheduling off and forces `spawn`, whatever the user asked for.
    How: after the platform's own `check_and_update_config`, which has the last
    word on these fields, the user's values come back and ours are filled in.
    Can go: when vLLM lets an executor class take part in configuration.
    """
    from vllm.platforms import current_platform

    from vllm_handoff.executor import server_patches
    from vllm_handoff.executor.configuration import complete, uses_handoff
    from vllm_handoff.executor.front_end import remove_at_exit

    platform = type(current_platform)
    owner = next(cls for cls in platform.__mro__ if "check_and_update_config" in cls.__dict__)

    def make(original: Any) -> classmethod:
        function = original.__func__

        @functools.wraps(function)
        def check_and_update_config(cls: type, vllm_config: Any) -> None:
            if not uses_handoff(vllm_config.parallel_config):
                return function(cls, vllm_config)
            asynchronous = vllm_config.scheduler_config.async_scheduling
            start_method = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")
            function(cls, vllm_config)
            vllm_config.scheduler_config.async_scheduling = asynchronous
            if start_method is not None:
                os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = start_method
            if vllm_config.model_config is not None and vllm_config.model_config.runner == "draft":
                # A worker's, made for its draft model from the engine's, which is complete. They share the rest.
                return None
            complete(vllm_config)
            remove_at_exit(vllm_config.instance_id)
            server_patches.apply()

        return classmethod(_mark(check_and_update_config))

    original = owner.__dict__["check_and_update_config"]
    if not getattr(original.__func__, _MARK, False):
        owner.check_and_update_config = make(original)  # type: ignore[attr-defined]


def _set_depth() -> None:
    """Let the depth be a setting.

    Why: vLLM 0.32 fixes the rounds in flight at stages + 1, which leaves the
    host less than one stage's time to collect an output and plan the next
    round. The property also sizes every ring of buffers, in every process, so
    it is the one place where depth can change safely.
    How: with our executor and asynchronous scheduling over several stages it
    returns the setting; otherwise vLLM's number.
    Can go: once vLLM makes the depth an option.
    """
    from vllm.config import VllmConfig

    from vllm_handoff.executor.configuration import uses_handoff
    from vllm_handoff.scheduler_ext.settings import HandoffSettings

    def make(original: Any) -> property:
        getter = original.fget

        @functools.wraps(getter)
        def max_concurrent_batches(self: Any) -> int:
            stages = self.parallel_config.pipeline_parallel_size
            if stages == 1 or not self.scheduler_config.async_scheduling or not uses_handoff(self.parallel_config):
                return getter(self)
            return HandoffSettings.of(self).rounds_in_flight(stages)

        return property(_mark(max_concurrent_batches))

    _wrap(VllmConfig, "max_concurrent_batches", make)


def _publish_metrics() -> None:
    """Put our metrics on vLLM's /metrics.

    Why: vLLM's plugin group for statistics cannot be limited to one executor:
    a stat logger that is installed switches statistics on for all of them,
    whatever --disable-log-stats says. (metrics.py has the other reason.)
    How: when vLLM makes its own loggers, and for our executor alone, a
    collector is registered beside them.
    Can go: when vLLM asks an executor for its metrics.
    """
    from vllm.v1.metrics.loggers import StatLoggerManager

    from vllm_handoff.executor.configuration import uses_handoff

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def init(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
            original(self, vllm_config, *args, **kwargs)
            if uses_handoff(vllm_config.parallel_config):
                from vllm_handoff.executor import metrics

                metrics.publish(vllm_config, self.engine_indexes)

        return _mark(init)

    _wrap(StatLoggerManager, "__init__", make)


def _refuse_what_does_not_fit() -> None:
    """Refuse a request that the workers could not take in, alone and at the door.

    Why: vLLM 0.32's V2 model runner raises while it takes a request in (more
    than 128 stop token ids with min_tokens, for instance), which ends the
    engine for everybody.
    How: the front end's input processor makes the request, as ever, and it is
    looked at before it goes to the engine. A server answers with status 400.
    Can go: once vLLM checks these limits itself.
    """
    from vllm.v1.engine.input_processor import InputProcessor

    from vllm_handoff.executor.configuration import uses_handoff
    from vllm_handoff.executor.request_limits import check_request

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def process_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
            request = original(self, *args, **kwargs)
            if uses_handoff(self.vllm_config.parallel_config):
                check_request(
                    request.sampling_params, request.prompt_token_ids, self.vllm_config.model_config.get_vocab_size()
                )
            return request

        return _mark(process_inputs)

    _wrap(InputProcessor, "process_inputs", make)


def _load_adapters_at_the_door() -> None:
    """Let a request whose LoRA adapter cannot be loaded fail alone.

    Why: vLLM 0.32's workers load an adapter in the round that first needs it,
    where an exception ends the engine for everybody.
    How: before the engine takes in a request with an adapter that the workers
    have not loaded yet, they load it, as for /v1/load_lora_adapter. What is
    raised here, vLLM gives back as this request's error.
    Can go: when vLLM loads adapters before it schedules their requests.
    """
    from vllm.v1.engine.core import EngineCore

    from vllm_handoff.executor.configuration import uses_handoff

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def preprocess_add_request(self: Any, request: Any) -> Any:
            if request.lora_request is not None and uses_handoff(self.vllm_config.parallel_config):
                self.model_executor.load_adapter(request.lora_request)
            return original(self, request)

        return _mark(preprocess_add_request)

    _wrap(EngineCore, "preprocess_add_request", make)
