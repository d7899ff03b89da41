"""Drafts of the next tokens."""


class LlamaDraftModel:
    """The base of drafters; only :class:`LlamaPromptLookupDecoding` is supported."""


class LlamaPromptLookupDecoding(LlamaDraftModel):
    """Drafts from earlier text: ``speculative_config="ngram"``. Answers are the same without it."""

    def __init__(self, max_ngram_size: int = 2, num_pred_tokens: int = 10) -> None:
        self.max_ngram_size = max_ngram_size
        self.num_pred_tokens = num_pred_tokens
