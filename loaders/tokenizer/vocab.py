"""The tokenizer of a GGUF file: a vocabulary with token types, and a function that encodes text.

Text is first split at control and user-defined tokens (``special.py``); the rest goes to the
model's algorithm (``spm.py``, ``byte_level.py``). The results match llama.cpp's published test
vectors, with one deliberate difference: ordinary text never merges into a control or byte token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from sdk.kernels.dataclass import dataclass
from sdk.loaders.tokenizer.base import Frame, TextTokenizer, TokenizerFacts, well_formed
from sdk.loaders.tokenizer.byte_level import EncodeText, token_bytes
from sdk.loaders.tokenizer.portions import counted_after
from sdk.loaders.tokenizer.special import SpecialSplitter
from sdk.loaders.tokenizer.spm import SPACE
from sdk.quant.tokenizer import TooManyTokens

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """``kinds``: the GGUF token type of each token (1 normal ... 6 byte)."""

    tokens: Sequence[str]
    kinds: bytes
    ids: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class EncodeRules:
    """``escape_spaces``: tokens spell a space ``▁``. ``space_prefix``: texts begin with a space.
    ``as_spelled``: normal tokens are spelled as the text that they stand for."""

    frame: Frame = Frame()
    space_prefix: bool = False
    escape_spaces: bool = False
    as_spelled: bool = False
    rstrip_ids: frozenset[int] = frozenset()


class VocabTokenizer(TextTokenizer):
    """A tokenizer built from the metadata of a GGUF file."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        rules: EncodeRules,
        facts: TokenizerFacts,
        encode_text: EncodeText,
    ) -> None:
        super().__init__(facts)
        self._vocabulary = vocabulary
        self._rules = rules
        self._encode_text = encode_text
        self._bytes: dict[int, bytes] = {}
        self.strips_leading_space = rules.space_prefix
        tokens, kinds = vocabulary.tokens, vocabulary.kinds
        user_defined = {text: i for i, text in of_kind(tokens, kinds, USER_DEFINED)}
        everything = dict(user_defined)
        for kind in (CONTROL, UNKNOWN):
            everything.update({text: i for i, text in of_kind(tokens, kinds, kind)})
        self._user_defined = SpecialSplitter(user_defined, rules.rstrip_ids)
        self._everything = SpecialSplitter(everything, rules.rstrip_ids)

    @property
    def vocab_size(self) -> int:
        return len(self._vocabulary.tokens)

    def token_to_id(self, token: str) -> int | None:
        return self._vocabulary.ids.get(token)

    def id_to_token(self, token_id: int) -> str | None:
        if 0 <= token_id < len(self._vocabulary.tokens):
            return self._vocabulary.tokens[token_id]
        return None

    def id_to_bytes(self, token_id: int) -> bytes:
        known = self._bytes.get(token_id)
        if known is None:
            known = self._spelled(token_id)
            if known:
                self._bytes[token_id] = known
        return known

    def _spelled(self, token_id: int) -> bytes:
        if not 0 <= token_id < len(self._vocabulary.tokens):
            return b""
        token, kind = self._vocabulary.tokens[token_id], self._vocabulary.kinds[token_id]
        if kind == BYTE:
            return bytes([int(token[3:5], 16)])
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) or self._rules.as_spelled:
            return token.encode("utf-8", "replace")
        if self._rules.escape_spaces:
            return token.replace(SPACE, " ").encode("utf-8", "replace")
        return token_bytes(token)

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        *,
        stop_after: int | None = None,
    ) -> list[int]:
        splitter = self._everything if parse_special else self._user_defined
        ids = self._encode_pieces(splitter.pieces(well_formed(text)), stop_after)
        if add_special_tokens:
            self._add_bos(ids)
            ids += self._rules.frame.last
        return ids

    @property
    def frame(self) -> Frame:
        return self._rules.frame

    def encode_continued(self, text: str, *, stop_after: int | None = None) -> list[int]:
        pieces = self._user_defined.pieces(well_formed(text))
        return self._encode_pieces(pieces, stop_after, after_special=False)

    def _encode_rendered(self, text: str, breaker: str | None, stop_after: int | None) -> list[int]:
        pieces = self._everything.pieces(well_formed(text))
        if breaker is not None:
            pieces = self._unbroken(pieces, breaker)
        ids = self._encode_pieces(pieces, stop_after)
        self._add_bos(ids)
        return ids

    def _unbroken(self, pieces: Iterable[str | int], breaker: str) -> Iterator[str | int]:
        for piece in pieces:
            if isinstance(piece, int):
                yield piece
            else:
                yield from self._user_defined.pieces(piece.replace(breaker, ""))

    def _encode_pieces(
        self, pieces: Iterable[str | int], stop_after: int | None, *, after_special: bool = True
    ) -> list[int]:
        ids: list[int] = []
        rules = self._rules
        for piece in pieces:
            left = None if stop_after is None else stop_after - len(ids)
            if left is not None and left < 0:
                raise TooManyTokens(len(ids))
            if isinstance(piece, int):
                ids.append(piece)
                after_special = True
                continue
            if rules.space_prefix and after_special:
                piece = " " + piece
            if rules.escape_spaces:
                piece = piece.replace(" ", SPACE)
            with counted_after(len(ids)):
                ids += self._encode_text(piece, left)
            after_special = False
        return ids

    def _add_bos(self, ids: list[int]) -> None:
        """Add BOS if the model expects it and the text does not begin with it."""
        first = self._rules.frame.first
        if first and ids[:1] != [*first]:
            ids.insert(0, *first)


def of_kind(tokens: Sequence[str], kinds: bytes, kind: int) -> list[tuple[int, str]]:
    """(id, spelling) of the tokens of one type; bytes.find quickly skips the other 250,000."""
    found = []
    index = kinds.find(kind)
    while index >= 0:
        found.append((index, tokens[index]))
        index = kinds.find(kind, index + 1)
    return found
