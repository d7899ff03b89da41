"""Encodes long texts in portions.

The tokenizers library holds the GIL for a whole call, about a second per MB, and every other thread
of the process waits. So a long text is cut at positions that no pre-tokenizer puts inside a word:
before a space between a letter or digit and a letter, and after a line break between something
visible and a letter. Texts without such a position for ``UNBROKEN`` characters go through the
library's batch call, which releases the GIL but leaves threads of the library behind.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from sdk.quant.tokenizer import TooManyTokens

PORTION = 4096  # characters: 2 to 5 ms
UNBROKEN = 65_536

_BREAK = re.compile(r"[ \n][^\W\d_]")


def _next_cut(text: str, position: int) -> int | None:
    for match in _BREAK.finditer(text, position):
        at = match.start()
        before = text[at - 1 : at]
        if text[at] == " " and before.isalnum():
            return at
        if text[at] == "\n" and before and not before.isspace():
            return at + 1
    return None


def portions(text: str, size: int = PORTION) -> Iterator[str]:
    """``text`` in parts of about ``size`` characters (1 or more). Encoded one by one, they give
    the same ids."""
    start = 0
    while len(text) - start > size:
        cut = _next_cut(text, start + size)
        if cut is None:
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def fewest_tokens(text: str, spellings: Collection[str], *, complete: bool = False) -> int:
    """A lower bound on the tokens of ``text``, if a token's spelling is the text that it covers.

    0 if a character is in no token, and so may be dropped; unless ``complete`` says that such
    characters have tokens too. Takes 20 ms for 50,000 spellings.
    """
    characters = set(text)
    if not complete and characters.difference(spellings):
        return 0
    fitting = (len(spelling) for spelling in spellings if characters.issuperset(spelling))
    return -(-len(text) // max(fitting, default=1))


def check_count(count: int, stop_after: int | None) -> None:
    """:raises TooManyTokens: ``count`` is more than ``stop_after``."""
    if stop_after is not None and count > stop_after:
        raise TooManyTokens(count)


@contextmanager
def counted_after(count: int) -> Iterator[None]:
    """Adds the ``count`` tokens before a part to what is said of the part if it is too long."""
    try:
        yield
    except TooManyTokens as error:
        raise TooManyTokens(count + error.at_least) from None


def run_library(backend: Any, text: str, add_special_tokens: bool = False) -> list[int]:
    """Ids of one portion. ``backend``: a ``tokenizers.Tokenizer``."""
    if len(text) > UNBROKEN:
        [encoding] = backend.encode_batch([text], add_special_tokens=add_special_tokens)
    else:
        encoding = backend.encode(text, add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


class PortionEncoder:
    """Encodes with a byte-level ``tokenizers.Tokenizer``.

    ``spellings``: of its tokens, in the byte alphabet to which ``to_bytes`` translates.
    ``divisible``: no word goes on where ``portions`` cuts.
    """

    def __init__(
        self,
        backend: Any,
        spellings: Collection[str],
        to_bytes: dict[int, str],
        *,
        divisible: bool = True,
    ) -> None:
        self._backend = backend
        self._divisible = divisible
        self._spellings = spellings
        self._to_bytes = to_bytes

    def encode(self, text: str, stop_after: int | None = None) -> list[int]:
        """:raises TooManyTokens: there are more than ``stop_after``."""
        if len(text) <= PORTION:
            return run_library(self._backend, text)
        ids: list[int] = []
        for portion in portions(text) if self._divisible else (text,):
            if len(portion) > UNBROKEN and stop_after is not None:
                spelled = portion.encode("utf-8").decode("latin-1").translate(self._to_bytes)
                check_count(len(ids) + fewest_tokens(spelled, self._spellings), stop_after)
            ids += run_library(self._backend, portion)
            check_count(len(ids), stop_after)
        return ids
