"""The texts of single tokens, decoded on demand."""

from __future__ import annotations

from sdk.quant.tokenizer import Tokenizer


class TokenTexts:
    """``texts[token_id]``: that single token's text, cached. Safe to use from any thread.

    It keeps the tokenizer, so log-probabilities can still be read after ``close``.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}
        self._listed: tuple[str, ...] = ()

    def __getitem__(self, token_id: int) -> str:
        text = self._known.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._known[token_id] = text
        return text

    def listed(self, count: int) -> tuple[str, ...]:
        """The texts of ids 0 to ``count - 1``; the same tuple for the same ``count``."""
        listed = self._listed
        if len(listed) != count:
            listed = self._listed = tuple(self[token_id] for token_id in range(count))
        return listed
