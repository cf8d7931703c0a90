"""vLLM's general plugin: what makes `--distributed-executor-backend` alone enough.

vLLM loads general plugins in every process, some of them more than once, so
everything here may run again without effect. Nothing here touches a
configuration whose executor is another one.
"""

from __future__ import annotations

from importlib.metadata import entry_points

PLUGIN_NAME = "vllm_handoff"

_loaded = False


class PluginNotLoadedError(RuntimeError):
    """HandoffExecutor is in use in a process where its vLLM plugin was not loaded."""


def register() -> None:
    """Entry point of the group `vllm.general_plugins`.

    With an unsupported vLLM it refuses configurations that name our executor,
    and no others: vLLM calls plugins whatever it was asked for, and what they
    raise ends it.
    """
    global _loaded
    if _loaded:
        return
    from vllm_handoff.executor import patches
    from vllm_handoff.executor.version import UnsupportedVllmError, check_vllm_version

    try:
        check_vllm_version()
    except UnsupportedVllmError as error:
        patches.refuse(error)
        return
    patches.apply()
    _loaded = True


def require_loaded() -> None:
    """Check that vLLM loaded the plugin in this process.

    Raises:
        PluginNotLoadedError: it did not, with the reason and the remedy.
    """
    if _loaded:
        return
    import vllm.envs as envs

    allowed = envs.VLLM_PLUGINS
    installed = any(entry.name == PLUGIN_NAME for entry in entry_points(group="vllm.general_plugins"))
    if allowed is not None and PLUGIN_NAME not in allowed:
        cause = f"VLLM_PLUGINS={','.join(allowed)!r} leaves it out: add {PLUGIN_NAME} to VLLM_PLUGINS, or unset it"
    elif not installed:
        cause = "its entry point is not installed: install the package with pip (a copied folder is not enough)"
    else:
        cause = "vLLM has not loaded its plugins in this process: call vllm.plugins.load_general_plugins() first"
    raise PluginNotLoadedError(f"HandoffExecutor needs the vLLM plugin {PLUGIN_NAME!r}, which is not loaded: {cause}.")
