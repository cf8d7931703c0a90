"""Benchmarks: vLLM's own executor and ours, side by side in one run."""
