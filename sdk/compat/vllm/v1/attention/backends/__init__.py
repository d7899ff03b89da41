"""The names of vLLM's kernels of attention."""
