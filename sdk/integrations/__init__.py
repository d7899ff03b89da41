"""Classes of frameworks over an :class:`sdk.LLM` in this process; each imports its framework."""
