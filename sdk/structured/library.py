"""llguidance (https://github.com/guidance-ai/llguidance, MIT), through its C interface.

The wheel's extension module exports the functions of ``llguidance.h``. They are used instead of the
Python classes because ``ctypes`` releases the interpreter lock around them (reading a vocabulary of
262,144 tokens takes a second, during which the Python class would stop every other request), and
because the CPU runtime calls them on its own threads (``sdk.kernels.operators.mask_tasks``).
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import threading
from collections.abc import Callable, Mapping, Sequence
from ctypes import (
    POINTER,
    Structure,
    byref,
    c_bool,
    c_char_p,
    c_int32,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
    sizeof,
)
from pathlib import Path
from typing import Any

import numpy as np

from sdk.api.errors import RequestError
from sdk.kernels.operators.mask_tasks import MaskFunctions
from sdk.kernels.packages import install, not_installed

#: Parts of the vocabulary whose masks are computed once. Strings of JSON are made of them: without
#: them a mask inside a string takes 1 ms for 49,152 tokens and 5 ms for 262,144, with them 0.02 to
#: 0.3 ms. Each part costs a copy of the tree of tokens: 1.3 MiB and 11 MiB.
_SLICES = (r'[^"\\\x00-\x1F\x7F]{1,10}', r'[^"\\\x00-\x1F\x7F]{1,30}')
_ERROR_BYTES = 4096
#: A longer text is cut here, or further on until it has this many tokens. The last ones depend on
#: what follows, and the library drops up to four.
_FORCED_BYTES, _FORCED_TOKENS, _UNSURE_TOKENS = 512, 64, 16


class _TokenizerInit(Structure):
    """``LlgTokenizerInitV2``."""

    _fields_ = [
        ("struct_size", c_size_t),
        *((name, c_uint32) for name in ("vocab_size", "eos")),
        *((name, c_void_p) for name in ("lengths", "bytes")),
        ("json", c_char_p),
        ("assumes_string", c_bool),
        ("function", c_void_p),
        ("greedy", c_bool),
        ("user_data", c_void_p),
        ("slices", c_void_p),
        ("more_eos", c_void_p),
        ("more_eos_count", c_uint32),
    ]


class _Limits(Structure):
    """``LlgParserLimits``."""

    _fields_ = [
        ("max_items_in_row", c_size_t),
        ("initial_lexer_fuel", c_uint64),
        ("step_lexer_fuel", c_uint64),
        ("step_max_items", c_size_t),
        ("max_lexer_states", c_size_t),
        ("max_grammar_size", c_size_t),
        ("precompute_large_lexemes", c_bool),
        ("verbose_errors", c_bool),
    ]


class _MatcherInit(Structure):
    """``LlgConstraintInit``."""

    _fields_ = [
        ("tokenizer", c_void_p),
        *((name, c_uint32) for name in ("log_buffer_level", "log_stderr_level")),
        *((name, c_bool) for name in ("ff_tokens", "backtrack")),
        ("limits", _Limits),
    ]


_TOKENS = POINTER(c_uint32)
#: ``LlgTokenizeFn``: user data, bytes, their number, the tokens to write, and at most how many.
_TOKENIZE = ctypes.CFUNCTYPE(c_size_t, c_void_p, c_void_p, c_size_t, _TOKENS, c_size_t)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "new_tokenizer_v2": (c_void_p, (POINTER(_TokenizerInit), c_char_p, c_size_t)),
    "free_tokenizer": (None, (c_void_p,)),
    "constraint_init_set_defaults": (None, (POINTER(_MatcherInit), c_void_p)),
    "new_matcher": (c_void_p, (POINTER(_MatcherInit), c_char_p, c_char_p)),
    "clone_matcher": (c_void_p, (c_void_p,)),
    "free_matcher": (None, (c_void_p,)),
    "matcher_get_error": (c_char_p, (c_void_p,)),
    "matcher_is_accepting": (c_bool, (c_void_p,)),
    "matcher_is_stopped": (c_bool, (c_void_p,)),
    "matcher_compute_mask_into": (c_int32, (c_void_p, c_void_p, c_size_t)),
    "matcher_consume_tokens": (c_int32, (c_void_p, _TOKENS, c_size_t)),
    "matcher_validate_tokens": (c_int32, (c_void_p, _TOKENS, c_size_t)),
    "matcher_rollback": (c_int32, (c_void_p, c_size_t)),
    "matcher_compute_ff_tokens": (c_int32, (c_void_p, _TOKENS, c_size_t)),
}
_MASK_FUNCTIONS = ("compute_mask_into", "validate_tokens", "consume_tokens", "rollback")


@functools.cache
def library() -> Any:
    """The C functions, with their signatures. :raises RequestError: llguidance is missing."""
    spec = importlib.util.find_spec("llguidance")
    if spec is None or not spec.submodule_search_locations:
        raise RequestError(f"structured output needs {not_installed('llguidance')}")
    folders = [Path(folder) for folder in spec.submodule_search_locations]
    files = [
        file
        for folder in folders
        for pattern in ("_lib*.so", "_lib*.pyd", "_lib*.dylib")
        for file in sorted(folder.glob(pattern))
    ]
    try:
        loaded = ctypes.CDLL(str(files[0]))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(loaded, f"llg_{name}")
            function.restype, function.argtypes = result, arguments
    except (IndexError, OSError, AttributeError) as error:
        raise RequestError(
            f"structured output cannot use the installed llguidance ({error}): "
            f"{install('llguidance')}"
        ) from error
    return loaded


@functools.cache
def mask_functions() -> MaskFunctions:
    """The functions with which a step computes masks."""
    names = [*(f"matcher_{name}" for name in _MASK_FUNCTIONS), "matcher_is_stopped"]
    functions = (getattr(library(), f"llg_{name}") for name in names)
    return MaskFunctions(*(ctypes.cast(one, c_void_p).value or 0 for one in functions))


class Vocabulary:
    """The bytes of a model's tokens, as the library's matchers use them.

    ``tokens``: the bytes of each id; control tokens are not text: theirs begin with 0xFF. Takes
    about 240 bytes a token, and 0.1 s for 49,152 tokens. ``encode``: the tokens of a text. Where a
    grammar forces a text, masks allow only these: other spellings are legal too, but a model has
    hardly seen them (``ir``, ``st`` for ``irst``), and answers better with the usual ones.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        eos_ids: Sequence[int],
        encode: Callable[[str], Sequence[int]],
    ) -> None:
        self.size = len(tokens)
        self.forced_text = _ForcedText()
        # It must live as long as the handle.
        self._tokenize = _tokenize_function(encode, self.forced_text)
        self.eos_ids = tuple(eos_ids)
        lengths = np.fromiter(map(len, tokens), np.uint32, len(tokens))
        data = np.frombuffer(b"".join(tokens) or b"\0", np.uint8)
        more = np.array(self.eos_ids[1:], np.uint32)
        slices = (c_char_p * (len(_SLICES) + 1))(*(one.encode() for one in _SLICES), None)
        init = _TokenizerInit(
            struct_size=sizeof(_TokenizerInit),
            vocab_size=self.size,
            eos=self.eos_ids[0] if self.eos_ids else 2**32 - 1,
            lengths=lengths.ctypes.data,
            bytes=data.ctypes.data,
            assumes_string=True,  # bytes that are no UTF-8 are not passed to the function
            # ``ctypes.cast`` would put both of these in reference cycles.
            function=c_void_p.from_buffer(self._tokenize),
            slices=ctypes.addressof(slices),
            more_eos=more.ctypes.data,
            more_eos_count=len(more),
        )
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        #: Masks that nobody reads are written here, by any thread.
        self.scratch = np.empty(-(-self.size // 32), np.uint32)
        self._library = library()
        self.handle = self._library.llg_new_tokenizer_v2(byref(init), error, _ERROR_BYTES)
        if not self.handle:
            raise RequestError(
                f"structured output cannot use this model's tokenizer: {_text(error.value)}"
            )

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.llg_free_tokenizer(self.handle)


class _ForcedText(threading.local):
    """Counts the bytes of forced text that this thread's calls of the library went through."""

    size = 0

    def take(self) -> int:
        """The bytes since the last call."""
        size, self.size = self.size, 0
        return size


def _tokenize_function(encode: Callable[[str], Sequence[int]], forced: _ForcedText) -> Any:
    """The library's ``LlgTokenizeFn``: the tokens of a text that the grammar forces.

    For each mask it asks for those of the whole rest of the forced text, and takes the first one.
    So it gets the first tokens of a long text: with all of them, a pattern with 16,000 characters
    in a row took 18 s to compile and kept 50 MB of known texts (llguidance 1.9.1).

    A method of the vocabulary would keep it, tens of megabytes, in a reference cycle.
    """

    def first_tokens(data: bytes) -> Sequence[int]:
        size = _FORCED_BYTES
        while size < len(data):
            found = encode(data[:size].decode("utf-8", "ignore"))
            if len(found) >= _FORCED_TOKENS:
                return found[:-_UNSURE_TOKENS]
            size *= 2
        return encode(data.decode("utf-8", "replace"))

    def write_tokens(_: int, text: Any, size: int, out: Any, room: int) -> int:
        forced.size += size
        found = first_tokens(ctypes.string_at(text, size))
        for index, token in enumerate(found[:room]):
            out[index] = token
        return len(found)

    return _TOKENIZE(write_tokens)


#: The library's error for a state after which nothing may follow.
DEAD_END = "NoExtensionBias"


class GrammarError(Exception):
    """A matcher cannot be built, or cannot go on. The text is the library's."""


class SearchLimit(GrammarError):
    """No complete text was found with the work that is allowed."""


class Matcher:
    """Follows the tokens of one answer through a grammar. Not thread-safe.

    The library keeps the last mask, and takes it for that of any state as many lexemes from the
    beginning whose lexeme has begun alike (llguidance 1.9.1): after ``{"a":`` is taken back, the
    mask of ``{"b":`` is that of ``a``. So after tokens are taken back, beyond which a mask was
    computed, the mask of that state takes the place of the last one. Where a text is forced, the
    library keeps no mask, so this does not always help: masks of answers come from matchers that
    never took back a state whose mask was computed, and searches check what a mask says.
    """

    __slots__ = ("_consumed", "_library", "_masked", "_vocabulary", "handle")

    def __init__(self, handle: int, vocabulary: Vocabulary, consumed: int = 0) -> None:
        self._library = library()
        self._vocabulary = vocabulary  # must outlive the matcher
        self.handle = handle
        self._consumed = self._masked = consumed  # tokens, in all and at the last mask

    @classmethod
    def of(
        cls, vocabulary: Vocabulary, kind: str, text: str, limits: Mapping[str, int] = {}
    ) -> Matcher:
        """``kind``: ``json_schema``, ``regex``, ``lark`` or ``llguidance``. ``limits``: fields of
        ``LlgParserLimits`` that differ from the library's own.

        :raises GrammarError: the grammar is invalid, not supported or too large.
        """
        functions = library()
        init = _MatcherInit()
        functions.llg_constraint_init_set_defaults(byref(init), vocabulary.handle)
        init.log_stderr_level = init.log_buffer_level = 0
        init.limits.verbose_errors = False
        for name, limit in limits.items():
            setattr(init.limits, name, limit)
        handle = functions.llg_new_matcher(byref(init), kind.encode(), text.encode())
        matcher = cls(handle, vocabulary)
        if (error := matcher.error) is not None:
            raise GrammarError(error)
        return matcher

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.llg_free_matcher(self.handle)

    def copy(self) -> Matcher:
        """A matcher in the same state. Takes about 10 us."""
        copied = Matcher(
            self._library.llg_clone_matcher(self.handle), self._vocabulary, self._consumed
        )
        copied._masked = self._masked
        return copied

    @property
    def error(self) -> str | None:
        """Why the matcher cannot go on; None: it can."""
        found = self._library.llg_matcher_get_error(self.handle)
        return None if found is None else _text(found)

    @property
    def accepting(self) -> bool:
        """Whether the text so far is complete. More may follow unless it :attr:`stopped`."""
        return bool(self._library.llg_matcher_is_accepting(self.handle))

    @property
    def stopped(self) -> bool:
        """Whether nothing may follow."""
        return bool(self._library.llg_matcher_is_stopped(self.handle))

    def consume(self, tokens: Sequence[int]) -> None:
        """Follow ``tokens``. :raises GrammarError: they do not fit; the matcher is useless then."""
        array = (c_uint32 * len(tokens))(*tokens)
        if self._library.llg_matcher_consume_tokens(self.handle, array, len(tokens)):
            raise GrammarError(self.error or "the tokens do not fit the grammar")
        self._consumed += len(tokens)

    def allowed(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens`` may follow, from the first on."""
        array = (c_uint32 * len(tokens))(*tokens)
        count = self._library.llg_matcher_validate_tokens(self.handle, array, len(tokens))
        if count < 0:
            raise GrammarError(self.error or "the matcher failed")
        return int(count)

    def forced(self, most: int) -> list[int]:
        """Up to ``most`` tokens that the grammar leaves no choice about, as the tokenizer spells
        them. Takes 1 us where there are none."""
        array = (c_uint32 * most)()
        count = self._library.llg_matcher_compute_ff_tokens(self.handle, array, most)
        return array[: max(count, 0)]

    def forced_bytes(self) -> int:
        """The bytes of forced text that this thread's calls since the last one went through: 0.1 us
        each, beside the time of a mask."""
        return self._vocabulary.forced_text.take()

    def rollback(self, count: int) -> None:
        """Take the last ``count`` tokens back."""
        if count and self._library.llg_matcher_rollback(self.handle, count):
            raise GrammarError(self.error or "the matcher failed")
        self._consumed -= count
        if self._masked > self._consumed:
            self.mask(self._vocabulary.scratch)

    def mask(self, out: np.ndarray[Any, np.dtype[np.uint32]]) -> None:
        """Write the tokens that may follow: one bit each, uint32 ``[words]``."""
        if self._library.llg_matcher_compute_mask_into(self.handle, out.ctypes.data, out.nbytes):
            raise GrammarError(self.error or "the matcher failed")
        self._masked = self._consumed


def _text(error: bytes) -> str:
    """The library's message without the dump of its state."""
    text = error.decode("utf-8", "replace")
    if "symbols.len() < u16::MAX" in text:
        return "it is too large: expected fewer than 65,525 rules and repetitions"
    for marker in ("\n<state>", "\n<non-verbose/>", "\n<backtrace>"):
        text = text.split(marker)[0]
    return text.strip()
