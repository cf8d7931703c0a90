"""Native CPU versions of the Triton kernels on the V2 model runner's path.

vLLM's V2 model runner launches Triton kernels, and Triton has no CPU backend. `register_cpu_kernels` puts a version in
NumPy or torch in the place of each kernel, through vLLM's own hook for that, so that a worker on a CPU can run the V2
runner.
"""

from __future__ import annotations


def register_cpu_kernels() -> None:
    """Make vLLM's V2 model runner launch the native kernels of this package. Further calls in a process do nothing.

    May be called before or after the runner's modules are imported; it imports those that hold kernels. On a CPU
    `vllm.v1.worker.cpu.shm` must have been imported before.

    Raises:
        RuntimeError: Triton works in this process, so nothing needs replacing.
    """
    from vllm_handoff.worker.cpu_kernels.registration import register_native_kernels

    register_native_kernels()
