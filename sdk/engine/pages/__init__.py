"""The pages of the KV cache: their owners, the prefixes in them, and where they are in memory."""
