"""Token healing: which tokens may continue a prompt whose last tokens were taken away.

The answer must begin with the text of these tokens. Other tokens may spell it, and the last of them
may reach beyond it: after "http:" the token "://" replaces ":".
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.operators.sampling import Change, ChangeKind

#: The most tokens that are taken from a prompt.
_MOST_TOKENS = 16

Ids = NDArray[np.int64]


class Vocabulary(Protocol):
    """The part of a tokenizer that healing needs."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def special_ids(self) -> frozenset[int]: ...
    def id_to_bytes(self, token_id: int) -> bytes: ...


class Healing:
    """The tokens allowed at the beginning of one answer, until it has spelled ``text``.

    ``allowed``: for each number of bytes spelled so far that tokens can reach. ``partial``: tokens
    that spell a part of the rest, each with the bytes spelled after it; any other allowed token
    spells the rest. ``vocab_size``: of the model. Read-only.
    """

    def __init__(
        self,
        text: bytes,
        allowed: dict[int, Ids],
        partial: dict[int, dict[int, int]],
        vocab_size: int,
    ) -> None:
        self.text = text
        self._allowed = allowed
        self._partial = partial
        self._vocab_size = vocab_size
        self._changes: dict[int, Change] = {}  # made when needed

    def after(self, spelled: int, token_id: int) -> int | None:
        """The bytes spelled after a token; ``None``: all of them."""
        return self._partial[spelled].get(token_id)

    def change(self, spelled: int) -> Change:
        """Forbids all other tokens."""
        change = self._changes.get(spelled)
        if change is None:
            others = np.ones(self._vocab_size, np.bool_)
            others[self._allowed[spelled]] = False
            change = self._changes[spelled] = Change(ChangeKind.FORBID, np.flatnonzero(others))
        return change


class TokenPrefixes:
    """The tokens of a vocabulary by the bytes that they begin with; control tokens are left out."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        """``vocab_size``: of the model, which may have padding rows."""
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        special = vocabulary.special_ids
        known = (i for i in range(min(vocabulary.vocab_size, vocab_size)) if i not in special)
        pairs = sorted((text, i) for i in known if (text := vocabulary.id_to_bytes(i)))
        self._texts = [text for text, _ in pairs]
        self._ids: Ids = np.array([i for _, i in pairs], np.int64)
        self._longest = max(map(len, self._texts), default=0)

    def heal(self, token_ids: Sequence[int]) -> tuple[int, Healing] | None:
        """How many tokens to take from the end of a prompt, and the beginning of its answer.

        As many as some longer token begins with; the first token always stays. ``None``: no token
        is longer, so taking one away would change nothing.
        """
        text, count, healed = b"", 0, b""
        for number in range(1, min(_MOST_TOKENS, len(token_ids) - 1) + 1):
            token_id = token_ids[-number]
            piece = self._vocabulary.id_to_bytes(token_id)
            if token_id in self._vocabulary.special_ids or not piece:
                break
            text = piece + text
            if len(text) >= self._longest:
                break
            if self._has_longer(text):
                count, healed = number, text
        return (count, self._healing(healed)) if count else None

    def _healing(self, text: bytes) -> Healing:
        allowed: dict[int, Ids] = {}
        partial: dict[int, dict[int, int]] = {}
        for spelled in reversed(range(len(text))):  # what follows a part must be possible
            rest = text[spelled:]
            first, last = self._range(rest)
            partial[spelled] = {
                int(token_id): spelled + size
                for size in range(1, len(rest))
                if spelled + size in allowed
                for token_id in self._spelling(rest[:size])
            }
            parts = np.fromiter(partial[spelled], np.int64)
            found = np.concatenate((self._ids[first:last], parts))
            if len(found):
                allowed[spelled] = found
        return Healing(text, allowed, partial, self._vocab_size)

    def _range(self, text: bytes) -> tuple[int, int]:
        """Where the tokens that begin with ``text`` are."""
        first = bisect_left(self._texts, text)
        last = bisect_left(self._texts, True, first, key=lambda found: not found.startswith(text))
        return first, last

    def _has_longer(self, text: bytes) -> bool:
        first, last = self._range(text)
        return last > first and len(self._texts[last - 1]) > len(text)

    def _spelling(self, text: bytes) -> Ids:
        """The tokens with exactly this text."""
        first = bisect_left(self._texts, text)
        last = bisect_left(self._texts, text + b"\0", first)
        return self._ids[first:last]
