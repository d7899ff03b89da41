"""From what callers give to token ids: texts, conversations, images, and their limits."""
