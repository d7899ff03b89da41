"""Finds the tokens that are recognised in raw text before any other tokenization.

Control tokens (``<|im_start|>``) and user-defined tokens (Gemma's runs of newlines) are split off
first; the rest of the text goes to the model's own algorithm. A vocabulary may hold thousands of
them (6,249 control tokens in Gemma 3), so one search finds the first two characters of tokens, and
the possible lengths are only looked up there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Set as AbstractSet


class SpecialSplitter:
    """Splits a text at the given tokens: leftmost first, the longest at each position."""

    def __init__(self, tokens: Mapping[str, int], rstrip: AbstractSet[int] = frozenset()) -> None:
        """``tokens``: spelling -> id; ``rstrip``: ids that absorb the white space after them."""
        self._tokens = {text: token_id for text, token_id in tokens.items() if text}
        self._rstrip = rstrip
        lengths: dict[str, set[int]] = {}
        for text in self._tokens:
            lengths.setdefault(text[:2], set()).add(len(text))
        for prefix, found in lengths.items():
            if len(prefix) == 2 and prefix[0] in lengths:
                found.add(1)
        self._lengths = {prefix: sorted(found, reverse=True) for prefix, found in lengths.items()}
        # Two-character prefixes come first, so that a one-character token does not hide them.
        prefixes = sorted(self._lengths, key=len, reverse=True)
        self._starts = re.compile("|".join(map(re.escape, prefixes))) if prefixes else None

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(start, end, token id) of every token in the text, in order and without overlap."""
        if self._starts is None:
            return
        position = 0
        while (match := self._starts.search(text, position)) is not None:
            start = match.start()
            position = start + 1
            for length in self._lengths[match.group()]:
                token_id = self._tokens.get(text[start : start + length])
                if token_id is not None:
                    position = start + length
                    yield start, position, token_id
                    break

    def split(self, text: str) -> list[str | int]:
        """The text as pieces of ordinary text (never empty) and token ids, in order."""
        return list(self.pieces(text))

    def pieces(self, text: str) -> Iterator[str | int]:
        """The pieces of :meth:`split`, one by one."""
        begin = 0
        for start, end, token_id in self.find(text):
            if start > begin:
                yield text[begin:start]
            yield token_id
            begin = end
            if token_id in self._rstrip:
                while begin < len(text) and text[begin] in " \t\n\v\f\r":
                    begin += 1
        if begin < len(text):
            yield text[begin:]
