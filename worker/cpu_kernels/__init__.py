"""Native CPU versions of the Triton kernels on the V2 model runner's path."""
