"""SentencePiece's BPE as described by GGUF files: pieces with scores, no list of merges.

Start from single characters. While two neighbours together are a piece, join the pair whose piece
has the highest score (the leftmost of equals). Characters that are not pieces become ``<0xNN>``
byte tokens. A space is written ``▁``.

This way a vocabulary of 262,144 pieces needs only one dictionary (30 ms); the equivalent list of
merges for a general BPE has half a million entries and takes seconds to build.

Texts are cut before each run of ``▁`` that follows another character, which is exact as long as no
piece contains such a position. The ids of words are cached, because most words of a text repeat.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heappush

from sdk.loaders.tokenizer.portions import PORTION, check_count, fewest_tokens
from sdk.quant.tokenizer import TooManyTokens

SPACE = "▁"

# Words cached per tokenizer: bounded, because text is untrusted. 20,000 words of at most 64
# characters take about 5 MB.
_MAX_WORDS = 20_000
_MAX_WORD_LEN = 64


class SpmEncoder:
    """Greedy merging by score with one vocabulary."""

    def __init__(
        self,
        pieces: Mapping[str, int],
        scores: Sequence[float],
        byte_ids: Sequence[int | None],
        unknown_id: int | None,
    ) -> None:
        """``pieces``: spelling -> id of tokens for plain text (no control or byte tokens).

        ``scores``: by id. ``byte_ids``: the token of each byte 0..255, or None.
        """
        self._pieces = pieces
        self._scores = scores
        self._byte_ids = byte_ids
        self._unknown_id = unknown_id
        self._complete = unknown_id is not None or None not in byte_ids
        self._words: dict[str, list[int]] = {}
        # Characters that some piece continues with a ▁ (none in Llama's, ">" in Gemma's).
        inside = re.findall(f"([^{SPACE}\0]){SPACE}", "\0".join(pieces))
        if inside:
            before = "[" + re.escape("".join(sorted(set(inside)))) + "]"
            joined = f"(?:(?<={before}){SPACE}+[^{SPACE}]*)*"
        else:
            joined = ""
        self._word = re.compile(f"{SPACE}*[^{SPACE}]+{joined}|{SPACE}+")

    def encode(self, text: str, stop_after: int | None = None) -> list[int]:
        """Token ids of ``text``, whose spaces are already written as ``▁``.

        :raises TooManyTokens: there are more than ``stop_after``.
        """
        ids: list[int] = []
        words = self._words
        for match in self._word.finditer(text):
            word = match[0]
            known = words.get(word)
            if known is None:
                if len(word) > PORTION and stop_after is not None:
                    fewest = fewest_tokens(word, self._pieces, complete=self._complete)
                    check_count(len(ids) + fewest, stop_after)
                known = self._merge(word)
                if len(word) <= _MAX_WORD_LEN:
                    if len(words) >= _MAX_WORDS:
                        words.clear()
                    words[word] = known
            ids += known
            if stop_after is not None and len(ids) > stop_after:
                raise TooManyTokens(len(ids))
        return ids

    def _merge(self, word: str) -> list[int]:
        """Join the best pair until none is left. O(n log n) with a heap of candidate pairs."""
        parts: list[str] = list(word)
        count = len(parts)
        following = list(range(1, count + 1))
        preceding = list(range(-1, count - 1))
        pieces, scores = self._pieces, self._scores
        # (-score, left, right, length): an entry is stale once either side has changed, which is
        # detected by the length of the pair.
        heap: list[tuple[float, int, int, int]] = []
        for left in range(count - 1):
            pair = parts[left] + parts[left + 1]
            token_id = pieces.get(pair)
            if token_id is not None:
                heap.append((-scores[token_id], left, left + 1, len(pair)))
        heapify(heap)
        while heap:
            _, left, right, length = heappop(heap)
            first, second = parts[left], parts[right]
            if not first or not second or len(first) + len(second) != length:
                continue
            parts[left] = merged = first + second
            parts[right] = ""
            after = following[left] = following[right]
            if after < count:
                preceding[after] = left
                pair = merged + parts[after]
                token_id = pieces.get(pair)
                if token_id is not None:
                    heappush(heap, (-scores[token_id], left, after, len(pair)))
            before = preceding[left]
            if before >= 0:
                pair = parts[before] + merged
                token_id = pieces.get(pair)
                if token_id is not None:
                    heappush(heap, (-scores[token_id], before, left, len(pair)))
        ids: list[int] = []
        for part in parts:
            if part:
                token_id = pieces.get(part)
                if token_id is None:
                    self._append_bytes(part, ids)
                else:
                    ids.append(token_id)
        return ids

    def _append_bytes(self, character: str, ids: list[int]) -> None:
        tokens = [self._byte_ids[byte] for byte in character.encode("utf-8")]
        if None not in tokens:
            ids += [token for token in tokens if token is not None]
        elif self._unknown_id is not None:
            ids.append(self._unknown_id)
