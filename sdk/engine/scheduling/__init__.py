"""Which request runs how many tokens in a step, and what a finished step means. No tensors."""
