"""Native CPU versions of the Triton kernels on the V2 model runner's path.

vLLM's V2 model runner launches Triton kernels, and Triton has no CPU backend. `register_cpu_kernels` puts a version in
NumPy or torch in the place of each kernel, through vLLM's own hook for that, so that a worker on a CPU can run the V2
runner.

Covered: everything that the runner launches for a decoder-only model that generates text, with every sampling option,
logprobs, structured output, thinking budgets and prompt embeddings. Kernels that have a part for draft tokens have it.
For speculative decoding: the rejection sampler, block verification included, and the proposers n-gram, EAGLE, EAGLE3,
MTP with one layer, and draft model.

Not covered: other proposers of draft tokens, adaptive verification (`acceptance_estimator`), Mamba and other recurrent
states, multimodal rotary positions, sampling split over tensor-parallel ranks (`batch_shard`) and watermarking. A
launch of one of those kernels fails with "'function' object is not subscriptable", a watermark in the rejection sampler
with NotImplementedError. Top-k and top-p need no kernel: without Triton vLLM takes its own torch version.
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
