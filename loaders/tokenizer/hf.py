"""A tokenizer.json, run by the ``tokenizers`` library.

The library encodes. Decoding works byte by byte if the file's decoder allows it, so that streaming
and whole texts give the same result: byte-level decoders, SentencePiece's chain (``▁`` is a space,
``<0xNN>`` a byte) and Metaspace. The one difference from the library: invalid UTF-8 becomes U+FFFD
as in Python's decoder, not one U+FFFD per byte of the whole run. For other decoders (WordPiece,
...), the library decodes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sdk.loaders.tokenizer.backend_traits import BackendTraits
from sdk.loaders.tokenizer.base import Frame, TextTokenizer, TokenizerFacts, well_formed
from sdk.loaders.tokenizer.byte_level import token_bytes
from sdk.loaders.tokenizer.json_parts import library_error, part_state, without_leading_space
from sdk.loaders.tokenizer.portions import (
    PORTION,
    UNBROKEN,
    check_count,
    counted_after,
    portions,
    run_library,
)
from sdk.loaders.tokenizer.special import SpecialSplitter
from sdk.loaders.tokenizer.spm import SPACE
from sdk.quant.once import Once
from sdk.quant.tokenizer import TooManyTokens

_NO_CHARACTER = "\U0010ffff"  # in no vocabulary: a model reads it as unknown
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class JsonTokenizer(TextTokenizer):
    """``backend``: a ``tokenizers.Tokenizer``, owned by this object from then on."""

    def __init__(
        self,
        backend: Any,
        facts: TokenizerFacts,
        file: str,
        *,
        add_bos: bool | None = None,
        chat_bos: bool = False,
    ) -> None:
        """``file``: the source of the backend, for messages.

        ``add_bos``: whether a text begins with BOS; None leaves it to the file.
        ``chat_bos``: whether a conversation does, if the template did not print it.

        :raises CheckpointError: the backend fails at its first word.
        """
        super().__init__(facts)
        self._file = file
        backend.no_truncation()
        backend.no_padding()
        _mark_special(backend, facts.special_ids)
        self._backend = backend
        self._size = backend.get_vocab_size(with_added_tokens=True)
        #: The library's spellings of added tokens; its model may have others for the same ids.
        self._added: dict[int, str] = {
            token_id: token.content
            for token_id, token in backend.get_added_tokens_decoder().items()
        }
        special = {self._added[i]: i for i in facts.special_ids if i in self._added}
        self._control = SpecialSplitter(special)
        self._add_bos = add_bos
        self._chat_bos = chat_bos
        # Recognition of control tokens is a setting of the backend, not of a call.
        self._lock = threading.Lock()
        self._continued = Once[Any]()
        self._unspaced = Once[Any]()
        self._frame = Once[Frame]()
        #: Special tokens that a Unigram model reads in plain text: they are pieces like others.
        self._unwanted = self._control_pieces()
        self._traits = Once[BackendTraits]()
        self._kind, self.strips_leading_space = _decoder_kind(backend.decoder)
        self.bytewise = self._kind != "other"
        self.decode(self._run("a 1", add_special_tokens=True, parse_special=True))

    @property
    def vocab_size(self) -> int:
        return int(self._size)

    def token_to_id(self, token: str) -> int | None:
        found: int | None = self._backend.token_to_id(token)
        return found

    def id_to_token(self, token_id: int) -> str | None:
        if token_id < 0:
            return None
        found: str | None = self._backend.id_to_token(token_id)
        return found

    def id_to_bytes(self, token_id: int) -> bytes:
        # The decoder reads added tokens like any other (Gemma's runs of spaces are some).
        token = self._added.get(token_id) or self.id_to_token(token_id)
        if token is None:
            return b""
        if self._kind == "bytes":
            return token_bytes(token)
        if self._kind == "fallback" and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        return token.replace(SPACE, " ").encode("utf-8")

    def opening_bytes(self, token_id: int) -> bytes:
        if self._kind != "spaces" or not self.strips_leading_space:
            return super().opening_bytes(token_id)
        token = self._added.get(token_id) or self.id_to_token(token_id) or ""
        return token.replace(SPACE, "").encode("utf-8")  # Metaspace drops all of the first token

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self.bytewise:
            return super().decode(ids, skip_special_tokens)
        skipped = self.special_ids if skip_special_tokens else frozenset()
        kept = [i for i in ids if i not in skipped and 0 <= i < self._size]
        try:
            text: str = self._backend.decode(kept, skip_special_tokens=False)
        except BaseException as error:
            raise library_error(error, self._file) from None
        return text

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        *,
        stop_after: int | None = None,
    ) -> list[int]:
        ids = self._run(well_formed(text), add_special_tokens, parse_special, stop_after)
        bos = self.bos_token_id
        if add_special_tokens and bos is not None:
            if ids[:2] == [bos, bos]:  # the text already began with it
                del ids[0]
            elif self._add_bos and ids[:1] != [bos]:
                ids.insert(0, bos)
            elif self._add_bos is False and ids[:1] == [bos] and not self._begins_with(bos, text):
                del ids[0]
        return ids

    def encode_continued(self, text: str, *, stop_after: int | None = None) -> list[int]:
        if not self.strips_leading_space:  # nothing is put before a first word
            return self._run(well_formed(text), False, False, stop_after)
        unspaced = self._unspaced(lambda: without_leading_space(self._backend))
        return self._run_copy(unspaced, well_formed(text), stop_after)

    @property
    def frame(self) -> Frame:
        return self._frame(self._found_frame)

    def _found_frame(self) -> Frame:
        """The special tokens around a text and between two, found by an example."""
        inside, whole = self.encode("a 1", False), self.encode("a 1")
        starts = range(len(whole) - len(inside) + 1)
        start = next((i for i in starts if whole[i : i + len(inside)] == inside), None)
        if start is None:
            return Frame()
        first, last = tuple(whole[:start]), tuple(whole[start + len(inside) :])
        with self._lock:
            pair = self._backend.encode("a 1", "a 1")
        texts, ids, types = pair.sequence_ids, pair.ids, pair.type_ids
        if 0 not in texts or 1 not in texts or not last:
            return Frame(first, last)  # such models read the second text as more of the first
        end = len(texts) - texts[::-1].index(0)
        between = tuple(ids[end : texts.index(1)])
        own = types[end : end + len(between)].count(0)
        return Frame(first, last, between, own, int(types[texts.index(1)] > 0))

    def _control_pieces(self) -> frozenset[int]:
        if type(self._backend.model).__name__ != "Unigram":
            return frozenset()
        unknown = {token.id for token in self._backend.model.tokenize(_NO_CHARACTER)}
        return frozenset(self.special_ids - unknown)

    def _plain(self, backend: Any, text: str) -> list[int]:
        """Ids of plain text by the backend or a copy that reads control tokens as text."""
        ids = run_library(backend, text)
        if self._unwanted.isdisjoint(ids):
            return ids
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [text]
        if backend.pre_tokenizer is not None:
            words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
        return [token_id for word in words for token_id in self._pieces(word)]

    def _pieces(self, word: str) -> list[int]:
        """The ids of a word; what spells a control token is cut after its first character."""
        tokens = self._backend.model.tokenize(word)
        found: list[int] = [token.id for token in tokens if token.id not in self._unwanted]
        if len(found) == len(tokens):
            return found
        cuts, at = [0], 0
        for token in tokens:
            if token.id in self._unwanted and len(token.value) > 1:
                cuts.append(at + 1)
            at += len(token.value)
        if len(cuts) == 1:
            return found  # a control token of one character is left out
        ends = [*cuts[1:], len(word)]
        return [
            i for start, end in zip(cuts, ends, strict=True) for i in self._pieces(word[start:end])
        ]

    def _begins_with(self, token_id: int, text: str) -> bool:
        return text.startswith(self.id_to_token(token_id) or "\0")

    def _run(
        self,
        text: str,
        add_special_tokens: bool,
        parse_special: bool,
        stop_after: int | None = None,
    ) -> list[int]:
        try:
            guarded = add_special_tokens and not parse_special and bool(self._unwanted)
            if len(text) <= PORTION and not guarded:
                return self._call(text, add_special_tokens, parse_special)
            around = self._around() if add_special_tokens else ([], [])
            if around is None:
                return self._call(text, add_special_tokens, parse_special)
            call = partial(self._call, add_special_tokens=False, parse_special=parse_special)
            ids = self._run_portions(text, stop_after, call)
            return [*around[0], *ids, *around[1]]
        except TooManyTokens:
            raise
        except BaseException as error:
            raise library_error(error, self._file) from None

    def _call(self, text: str, add_special_tokens: bool, parse_special: bool) -> list[int]:
        with self._lock:
            self._backend.encode_special_tokens = not parse_special
            if not parse_special and self._unwanted and not add_special_tokens:
                return self._plain(self._backend, text)
            return run_library(self._backend, text, add_special_tokens=add_special_tokens)

    def _run_portions(
        self, text: str, stop_after: int | None, call: Callable[[str], list[int]]
    ) -> list[int]:
        """Ids of a long text; ``call`` encodes one portion."""
        traits = self._traits(lambda: BackendTraits.of(self._backend))
        ids: list[int] = []
        for portion in portions(text) if traits.divisible else (text,):
            if len(portion) > UNBROKEN and stop_after is not None:
                check_count(len(ids) + traits.fewest_tokens(portion), stop_after)
            ids += call(portion)
            check_count(len(ids), stop_after)
        return ids

    def _around(self) -> tuple[list[int], list[int]] | None:
        """The special tokens before and after a text; None if they cannot be told apart."""
        inside, whole = self._call("a 1", False, False), self._call("a 1", True, False)
        for start in range(len(whole) - len(inside) + 1):
            if whole[start : start + len(inside)] == inside:
                return whole[:start], whole[start + len(inside) :]
        return None

    def _run_continued(self, text: str, stop_after: int | None) -> list[int]:
        """Ids of plain text inside a longer text: no ▁ is put before its first word."""
        return self._run_copy(self._continued(self._without_prepending), text, stop_after)

    def _without_prepending(self) -> Any:
        from tokenizers import Tokenizer

        source = self._backend.to_str()
        first, never = '"prepend_scheme":"first"', '"prepend_scheme":"never"'
        made = Tokenizer.from_str(source.replace(first, never))
        made.encode_special_tokens = True
        return made

    def _run_copy(self, backend: Any, text: str, stop_after: int | None) -> list[int]:
        """Ids of plain text by a copy of the backend with other settings."""
        try:
            if len(text) <= PORTION:
                return self._plain(backend, text)
            return self._run_portions(text, stop_after, partial(self._plain, backend))
        except TooManyTokens:
            raise
        except BaseException as error:
            raise library_error(error, self._file) from None

    def _encode_rendered(self, text: str, breaker: str | None, stop_after: int | None) -> list[int]:
        text = well_formed(text)
        if breaker is None:
            ids = self._run(text, False, True, stop_after)
        else:
            ids = []
            for piece in self._control.pieces(text):
                left = None if stop_after is None else stop_after - len(ids)
                check_count(len(ids), stop_after)
                if isinstance(piece, int):
                    ids.append(piece)
                    continue
                plain = piece.replace(breaker, "")
                with counted_after(len(ids)):
                    if ids:
                        ids += self._run_continued(plain, left)
                    else:
                        ids += self._run(plain, False, False, left)
        bos = self.bos_token_id
        if self._chat_bos and bos is not None and ids[:1] != [bos]:
            ids.insert(0, bos)
        return ids


def _mark_special(backend: Any, special: frozenset[int]) -> None:
    """Mark tokens in the backend that other files call special, so that they stay text wherever
    special tokens must not be recognised."""
    from tokenizers import AddedToken

    added = backend.get_added_tokens_decoder()
    unmarked = [i for i in sorted(special) if i not in added or not added[i].special]
    names = [backend.id_to_token(i) for i in unmarked]
    backend.add_special_tokens([AddedToken(n, special=True, normalized=False) for n in names if n])


def _decoder_kind(decoder: Any) -> tuple[str, bool]:
    """The kind of decoder ("bytes", "fallback", "spaces" or "other"), and whether it drops the
    first space of a text."""
    if decoder is None:
        return "other", False
    state = part_state(decoder)
    chain = state["decoders"] if state.get("type") == "Sequence" else [state]
    kinds = [step["type"] for step in chain]
    if kinds == ["ByteLevel"]:
        return "bytes", False
    if kinds == ["Metaspace"]:
        kind = "spaces" if chain[0].get("replacement") == SPACE else "other"
        return kind, chain[0].get("prepend_scheme") != "never"
    strip = kinds[-1:] == ["Strip"]
    if kinds[: len(kinds) - strip] == ["Replace", "ByteFallback", "Fuse"]:
        step = chain[0]
        to_space = step["pattern"] == {"String": SPACE} and step["content"] == " "
        last = chain[-1]
        one_space = not strip or (last["content"], last["start"], last["stop"]) == (" ", 1, 0)
        if to_space and one_space:
            return "fallback", strip
    return "other", False
