"""Compiles structures for one model's vocabulary, and keeps the last ones."""

from __future__ import annotations

import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from sdk.api.errors import RequestError
from sdk.api.structured_params import StructuredOutputsParams
from sdk.kernels.system import SYSTEM
from sdk.quant.once import Once
from sdk.quant.tokenizer import Tokenizer
from sdk.structured.bound import Bound, longest_completion, longest_match
from sdk.structured.definition import Definition, definition_of
from sdk.structured.library import DEAD_END, GrammarError, Matcher, SearchLimit, Vocabulary
from sdk.structured.shortest import Search, TokenShapes

_T = TypeVar("_T")
#: Limits of a matcher: a state of its lexer takes 1 to 2 kB.
_LIMITS = {"max_lexer_states": 50_000}
#: Masks that are computed to find the shortest answer (20 us to 1 ms each), and the most tokens of
#: that answer. Text that leaves no choice needs no mask.
_MOST_MASKS, _MOST_TOKENS = 6000, 4096
#: After this many masks (about 0.1 s) a search begins again on a thread of its own that has this
#: niceness. On two busy CPUs steps then took 1.3 to 1.7 times as long, instead of 1.6 to 2.3 times
#: (docs/log.md).
_FEW_MASKS, _NICENESS = 1000, 10
#: The compiled structures that are kept take about this many bytes (64 MiB), an estimate: schemas
#: of MaskBench took 0.2 to 0.45 MiB each, with the search for the shortest answer (mean of 364).
_CACHE_BYTES = 2**26
_MATCHER_BYTES, _CHARACTER_BYTES = 250_000, 40
_KNOWN_TEXTS = 4096
#: Texts that end a value or a container.
_CLOSERS = ('"', "}", "]", '"}', '"]', "]}", "}}", '""', "0")


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled structure. Answers work with copies of ``matcher``.

    ``way``: tokens of the shortest answer that was found. ``bound``: what completes any text.
    """

    matcher: Matcher
    way: tuple[int, ...]
    bound: Bound
    tokens: GrammarTokens


@dataclass(frozen=True, slots=True, eq=False)
class GrammarTokens:
    """A vocabulary as matchers and searches use it.

    ``closers``: tokens that may end a value. ``encode``: the tokens of a text, control tokens
    excluded; known texts take 1 us instead of 30 us.
    """

    vocabulary: Vocabulary
    shapes: TokenShapes
    closers: tuple[tuple[int, ...], ...]
    encode: Callable[[str], tuple[int, ...]]

    @property
    def words(self) -> int:
        """Words of a mask: one bit for each id of the model."""
        return -(-self.vocabulary.size // 32)

    def search(self) -> Search:
        """A search of its own."""
        return Search(self.shapes, self.words)


class _Spelling:
    """The tokens of texts. Apart from the compiler, which would be in a reference cycle with what
    keeps a way to spell."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = Once[list[int]]()  # the tokens of single bytes

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a text; if they do not spell it exactly, a token for each byte."""
        tokens = self._tokenizer.encode_continued(text)
        data = text.encode("utf-8", "replace")
        if b"".join(map(self._tokenizer.id_to_bytes, tokens)) == data:
            return tuple(tokens)
        single = self._bytes(self._read_bytes)
        spelled = [single[byte] for byte in data]
        return () if -1 in spelled else tuple(spelled)

    def _read_bytes(self) -> list[int]:
        known = {self._tokenizer.id_to_bytes(i): i for i in range(self._tokenizer.vocab_size)}
        return [known.get(bytes((byte,)), -1) for byte in range(256)]


class GrammarCompiler:
    """Compiles the structures of one model. Safe to use from any thread.

    The vocabulary is read with the first structure. ``vocab_size``: the ids of the model, which may
    have padding rows. ``eos_token_ids``: the tokens that end an answer.
    """

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokens = Once[GrammarTokens]()
        self._spelling = _Spelling(tokenizer)
        #: The structures that are being compiled: requests with the same one wait.
        self._begun: dict[Definition, Future[Grammar]] = {}
        self._cache: OrderedDict[Definition, Grammar] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()
        #: Held by the only long search.
        self._long_search = threading.Lock()

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """:raises RequestError: llguidance is missing, a construct is not supported, or no answer
        can be found that follows it."""
        definition = definition_of(params, self._is_special)
        with self._lock:
            if (found := self._cache.get(definition)) is not None:
                self._cache.move_to_end(definition)
                return found
            if (begun := self._begun.get(definition)) is None:
                mine = self._begun[definition] = Future()
        if begun is not None:
            return self._named(params, begun.result)
        try:
            grammar = self._named(
                params, lambda: self._compile(definition, self._tokens(self._read_vocabulary))
            )
            mine.set_result(grammar)
        except BaseException as error:
            known = isinstance(error, Exception)
            mine.set_exception(error if known else RequestError("the request was interrupted"))
            raise
        finally:
            with self._lock:
                del self._begun[definition]
                if mine.exception() is None:
                    self._keep(definition, mine.result())
        return grammar

    @staticmethod
    def _named(params: StructuredOutputsParams, compiled: Callable[[], Grammar]) -> Grammar:
        try:
            return compiled()
        except GrammarError as error:
            why = "a part of it has no end, such as a $ref that leads to itself"
            why = why if DEAD_END in str(error) else str(error)
            raise RequestError(f"{params.kind}: it cannot be enforced: {why}") from error

    def _compile(self, definition: Definition, tokens: GrammarTokens) -> Grammar:
        matcher = Matcher.of(tokens.vocabulary, definition.kind, definition.text, _LIMITS)
        hints = [self._spelling.encode(hint) for hint in definition.hints]

        def search(masks: int) -> tuple[int, ...] | None:
            return tokens.search().shortest(
                matcher.copy(),
                _MOST_TOKENS,
                hints=[hint for hint in hints if hint],
                masks=masks,
            )

        try:
            way = search(_FEW_MASKS)
        except SearchLimit:
            with self._long_search:
                way = _at_low_priority(lambda: search(_MOST_MASKS))
        if way is None:
            raise GrammarError(
                f"no answer of at most {_MOST_TOKENS} tokens was found that follows it"
            )
        return Grammar(matcher, self._canonical(matcher, way), self._bound(definition), tokens)

    def _bound(self, definition: Definition) -> Bound:
        if definition.kind == "json_schema":
            schema = json.loads(definition.text)
            return longest_completion(schema, lambda text: len(self._spelling.encode(text)))
        return longest_match(definition.text) if definition.kind == "regex" else Bound()

    def _canonical(self, matcher: Matcher, way: tuple[int, ...]) -> tuple[int, ...]:
        """The way as the tokenizer would write it, if that is no longer."""
        text = self._tokenizer.decode(way, skip_special_tokens=False)
        tokens = tuple(self._spelling.encode(text))
        if len(tokens) > len(way):
            return way
        walk = matcher.copy()  # the states of 15,000 characters, 4.5 MB, stay out of what is kept
        if walk.allowed(tokens) < len(tokens):
            return way
        walk.consume(tokens)
        return tokens if walk.accepting else way

    def _is_special(self, text: str) -> bool:
        token = self._tokenizer.token_to_id(text)
        return token is not None and token in self._tokenizer.special_ids

    def _read_vocabulary(self) -> GrammarTokens:
        tokenizer = self._tokenizer
        if not tokenizer.bytewise:
            raise RequestError(
                "structured output needs a tokenizer whose tokens are bytes of the text; this "
                "model's decoder depends on neighbouring tokens"
            )
        count = min(tokenizer.vocab_size, self._vocab_size)
        padding = [b""] * (self._vocab_size - count)
        special = tokenizer.special_ids | self._eos_token_ids
        pieces = [tokenizer.id_to_bytes(token) for token in range(count)]
        texts = [b"" if i in special else piece for i, piece in enumerate(pieces)]
        marked = [b"\xff" + piece if i in special else piece for i, piece in enumerate(pieces)]
        ends = sorted(token for token in self._eos_token_ids if token < count)
        encode = functools.lru_cache(maxsize=_KNOWN_TEXTS)(self._spelling.encode)
        closers = [encode(text) for text in _CLOSERS]
        return GrammarTokens(
            Vocabulary(marked + padding, ends, encode),
            TokenShapes(texts + padding),
            tuple(dict.fromkeys(closer for closer in closers if len(closer) == 1)),
            encode,
        )

    def _keep(self, definition: Definition, grammar: Grammar) -> None:
        if definition in self._cache:
            return
        self._cache[definition] = grammar
        self._cached_bytes += _estimated_bytes(definition)
        while self._cached_bytes > _CACHE_BYTES and len(self._cache) > 1:
            oldest, _ = self._cache.popitem(last=False)
            self._cached_bytes -= _estimated_bytes(oldest)


def _at_low_priority(work: Callable[[], _T]) -> _T:
    """The result of ``work``, on a thread that takes less of the CPUs than those that run steps."""
    future: Future[_T] = Future()

    def run() -> None:
        SYSTEM.lower_priority(_NICENESS)
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="sdk-structure", daemon=True).start()
    return future.result()


def _estimated_bytes(definition: Definition) -> int:
    return _MATCHER_BYTES + _CHARACTER_BYTES * len(definition.text)


#: Compiles the structure in a request's parameters.
Compile = Callable[[StructuredOutputsParams], Grammar]
