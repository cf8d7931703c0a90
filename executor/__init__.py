"""The executor, its control plane and the vLLM plugin."""
