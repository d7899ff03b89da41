"""The pages of the KV cache: who holds them, what prefix is in them, where they lie."""
