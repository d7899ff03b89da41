"""Turns generated token ids into text as they arrive, without decoding anything twice.

Most tokenizers work byte by byte (``Tokenizer.bytewise``): a token adds its bytes, and the first
bytes of a character wait until the others arrive. This costs the same for the first token and the
hundred-thousandth, and gives exactly ``tokenizer.decode`` of all ids.

Some decoders look at neighbouring tokens (WordPiece joins ``##ing`` to the word before). For these,
the last few tokens are decoded with and without the new one; the difference is the new text.
"""

from __future__ import annotations

import copy
from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sdk.quant.tokenizer import Tokenizer

# The most tokens that wait for the rest of a character. A character has at most four bytes, so
# four tokens; if more wait, the rest will not come.
_MAX_WAITING = 6
# The most tokens of a window without text that stay for context.
_MOST_KEPT = 4 * _MAX_WAITING


class IncrementalDetokenizer:
    """The text of one request's output. Not shared between threads."""

    __slots__ = ("_healed", "_rest", "_skipped", "_strip", "_tokenizer", "_window")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        healed_bytes: int = 0,
    ) -> None:
        """``prompt_token_ids``: the tokens before the output; only their end is used. After a
        prompt the first word keeps its leading space.

        ``spaces_between_special_tokens=False``: if special tokens are shown, the decoder's space
        between two of them in a row is left out. ``healed_bytes``: this many bytes at the beginning
        belong to the prompt (token healing) and are left out.
        """
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._strip = tokenizer.strips_leading_space and not prompt_token_ids
        self._healed = healed_bytes
        self._rest = b""  # the first bytes of an unfinished character
        self._window: _Window | None = None
        if not tokenizer.bytewise:
            tight = not (skip_special_tokens or spaces_between_special_tokens)
            self._window = _Window(
                tokenizer, prompt_token_ids[-_MAX_WAITING:], self._skipped, tight
            )

    @property
    def waits(self) -> bool:
        """Whether the last tokens have text that is not final yet."""
        return bool(self._rest) if self._window is None else self._window.waits

    def copy(self) -> IncrementalDetokenizer:
        """A copy that goes on independently."""
        other = copy.copy(self)
        if self._window is not None:
            other._window = copy.copy(self._window)  # push replaces its lists, except one
            other._window._ids = self._window._ids.copy()
        return other

    def push(self, token_id: int) -> str:
        """The text that is final once this token is known; may be empty."""
        if token_id in self._skipped:
            return ""
        if self._window is not None:
            return self._window.push(token_id)
        return self._decode(self._bytes(token_id))

    def extend(self, token_ids: Iterable[int]) -> str:
        """:meth:`push` for several tokens."""
        shown = [token_id for token_id in token_ids if token_id not in self._skipped]
        if self._window is not None:
            return "".join(map(self._window.push, shown))
        return self._decode(b"".join(map(self._bytes, shown)))

    def _bytes(self, token_id: int) -> bytes:
        data = self._tokenizer.id_to_bytes(token_id)
        if self._strip and data:
            self._strip = False
            data = self._tokenizer.opening_bytes(token_id)
        return data

    def _decode(self, data: bytes) -> str:
        if self._healed:
            data, self._healed = data[self._healed :], max(0, self._healed - len(data))
        if self._rest:
            data = self._rest + data
        text, used = utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def finish(self) -> str:
        """The text still withheld: an unfinished character, as U+FFFD. Call it once, at the end."""
        if self._window is not None:
            return self._window.finish()
        return self._rest.decode("utf-8", "replace")


class _Window:
    """The last tokens of a text whose decoder looks at neighbouring tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        skipped: frozenset[int],
        tight: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._ids = [token_id for token_id in prompt if token_id not in skipped]
        self._read = len(self._ids)  # ids before this one are already text
        self._shown = self._decode(self._ids)
        self._tight = tight
        self._after_special = False

    @property
    def waits(self) -> bool:
        return len(self._ids) > self._read

    def push(self, token_id: int) -> str:
        if self._tokenizer.id_to_token(token_id) is None:
            return ""  # an id of the padded vocabulary: no text, and no context for the next token
        self._ids.append(token_id)
        special = token_id in self._tokenizer.special_ids
        raw = self._tight and special and self._after_special
        self._after_special = special
        text = self._decode(self._ids)
        waiting = len(self._ids) - self._read
        new = text[len(self._shown) :]
        if (not new or text.endswith("\ufffd")) and waiting < _MAX_WAITING:
            return ""
        # Keep the tokens that became text just now as the context of the next ones. A decoder that
        # strips spaces at the beginning may leave nothing of them: then it would strip the next
        # token's too, and what is before them stays.
        kept = self._ids[self._read :]
        self._shown = self._decode(kept)
        if not self._shown and len(self._ids) <= _MOST_KEPT:
            kept, self._shown = self._ids, text
        self._ids, self._read = kept, len(kept)
        return (self._tokenizer.id_to_token(token_id) or "") if raw else new

    def finish(self) -> str:
        new = self._decode(self._ids)[len(self._shown) :]
        self._ids, self._read, self._shown = [], 0, ""
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
