"""Builds a tokenizer from the metadata of a GGUF file.

Everything in the file is checked before it is used: a wrong length, a merge without its two halves,
a byte token ``<0x-1>`` or an id outside the vocabulary raises a ``CheckpointError`` that names the
file, the key, what was expected and what was found.

There are three sources, best first: a ``tokenizer.json`` next to the file (if it has the same
vocabulary), the key ``tokenizer.huggingface.json``, and the ``tokenizer.ggml.*`` keys.
"""

from __future__ import annotations

import logging
import re
from array import array
from collections import ChainMap, Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import repeat
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.dataclass import dataclass
from sdk.kernels.packages import package
from sdk.loaders.tokenizer.base import Frame, TokenizerFacts
from sdk.loaders.tokenizer.byte_level import EncodeText, byte_level_encoder, raw_encoder
from sdk.loaders.tokenizer.end_tokens import end_token_ids
from sdk.loaders.tokenizer.fim import fim_tokens, named_fim_tokens
from sdk.loaders.tokenizer.metadata import Metadata
from sdk.loaders.tokenizer.pretokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer
from sdk.loaders.tokenizer.spm import SpmEncoder
from sdk.loaders.tokenizer.vocab import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    EncodeRules,
    VocabTokenizer,
    Vocabulary,
    of_kind,
)
from sdk.quant.errors import UnsupportedError
from sdk.quant.tokenizer import Tokenizer

_LOG = logging.getLogger("sdk")
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_MODELS = ("gpt2", "llama", "gemma4", "bert", "t5", "rwkv", "plamo2")
_ENCODERS = ("bert", "t5")
#: Ids of special tokens where a file does not name them; llama.cpp's.
_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {
        "llama": {"bos": 1, "eos": 2, "unknown": 0},
        "bert": {"bos": 101, "unknown": 100, "seperator": 102, "padding": 0, "mask": 103},
        "t5": {"eos": 1, "unknown": 2, "padding": 0},
        "plamo2": {"bos": 1, "eos": 2, "unknown": 0, "padding": 3},
    }
)
_TEMPLATE = "tokenizer.chat_template"
_PRE = "tokenizer.ggml.pre"


@dataclass(frozen=True, slots=True)
class _Specials:
    bos: int | None
    eos: int | None
    unknown: int | None
    padding: int | None
    separator: int | None
    mask: int | None
    ends: frozenset[int]


def tokenizer_from_gguf(
    metadata: Mapping[str, object],
    file: str,
    *,
    extra_eos: frozenset[int] = frozenset(),
    pre_tokenizer: str | None = None,
) -> Tokenizer:
    """The tokenizer of a GGUF file whose metadata has been read.

    ``metadata``: key -> Python value; arrays as lists, tuples or numpy arrays, ``tokens`` and
    ``merges`` as lists of str. ``file``: path of the file, for messages and to find a
    ``tokenizer.json`` next to it. ``extra_eos``: more ids that end an answer (from a
    generation_config.json). ``pre_tokenizer``: the name of a word split to use instead of the
    file's; then a ``tokenizer.json`` is not used.

    Raises:
        CheckpointError: the metadata contradicts itself.
        UnsupportedError: this kind of tokenizer, or the name of its word split, is not supported.
    """
    meta = Metadata(metadata, file)
    model = meta.text("tokenizer.ggml.model")
    if model is None:
        raise meta.error("tokenizer.ggml.model", f"one of {', '.join(_MODELS)}", "no such key")
    if model not in _MODELS:
        raise UnsupportedError(
            f"{file}: tokenizer.ggml.model: expected one of {', '.join(_MODELS)}, found {model!r}. "
            "Open the file with skip_tokenizer_init=True and pass token ids"
        )
    tokens, kinds = _tokens(meta)
    if model == "bert":
        from sdk.loaders.tokenizer.encoders import respelled

        tokens = respelled(tokens, bytes(kinds))
    elif model == "rwkv":
        from sdk.loaders.tokenizer.rwkv import unescaped

        tokens = unescaped(tokens, bytes(kinds))
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        twice = next(text for text, times in Counter(tokens).items() if times > 1)
        raise meta.error("tokenizer.ggml.tokens", "no token twice", repr(twice))
    specials = _specials(meta, model, ids, kinds)
    specials = replace(specials, ends=specials.ends | extra_eos)
    if model in _ENCODERS:
        vocabulary = Vocabulary(tokens, bytes(kinds), ids)
        return _of_encoder(meta, model, vocabulary, specials, pre_tokenizer)
    plain, others = _plain(tokens, ids, kinds, model)
    vocabulary = Vocabulary(tokens, bytes(kinds), ChainMap(plain, others))
    warnings: list[str] = []
    pre = _pre_tokenizer(meta, model, pre_tokenizer, warnings)
    facts = _facts(meta, vocabulary, specials, ())
    by_model = model == "llama" or (pre is not None and pre.add_bos)
    add_bos = meta.flag("tokenizer.ggml.add_bos_token", by_model)

    from sdk.loaders.tokenizer.original_json import tokenizer_json_for

    better = tokenizer_json_for(meta, vocabulary, facts, add_bos)
    if better is not None and pre_tokenizer is None:
        return better
    if pre is None:
        raise _unknown_split(meta)
    facts = replace(facts, warnings=tuple(warnings))
    encode = _encoder(meta, model, vocabulary, plain, specials, pre)
    for warning in warnings:
        _LOG.warning("%s: %s", file, warning)
    bos = specials.bos if add_bos else None
    eos = specials.eos if meta.flag("tokenizer.ggml.add_eos_token", False) else None
    separator = _separator(meta, specials, pre.add_sep) if eos is not None else None
    spaced = model == "llama" and meta.flag("tokenizer.ggml.add_space_prefix", True)
    rules = EncodeRules(
        frame=Frame(_some(bos), _some(eos), _some(eos, separator)),
        space_prefix=spaced,
        escape_spaces=model == "llama" or pre.raw,
        as_spelled=model == "plamo2",
        rstrip_ids=_rstrip_ids(meta, vocabulary),
    )
    return VocabTokenizer(vocabulary, rules, facts, encode)


def _encoder(
    meta: Metadata,
    model: str,
    vocabulary: Vocabulary,
    pieces: Mapping[str, int],
    specials: _Specials,
    pre: PreTokenizer,
) -> EncodeText:
    """The function that encodes a text without special tokens."""
    if model == "llama":
        scores, byte_ids = _scores(meta, vocabulary, nan=False), _byte_ids(vocabulary)
        # a list of 262,144 floats takes 8 MiB
        as_floats = array("d", scores.astype(np.float64))
        return SpmEncoder(pieces, as_floats, byte_ids, specials.unknown).encode
    if model == "plamo2":
        from sdk.loaders.tokenizer.plamo2 import LargestSum

        scores = _scores(meta, vocabulary, nan=True)
        return LargestSum(meta, pieces, scores, _byte_ids(vocabulary)).encode
    if model == "rwkv":
        from sdk.loaders.tokenizer.rwkv import LongestMatch

        return LongestMatch(meta, pieces).encode
    return _bpe(meta, vocabulary, pieces, pre)


def _of_encoder(
    meta: Metadata,
    model: str,
    vocabulary: Vocabulary,
    specials: _Specials,
    pre_tokenizer: str | None,
) -> Tokenizer:
    """The tokenizer of a ``bert`` or ``t5`` file, or the tokenizer.json next to it."""
    if pre_tokenizer is not None:
        _asked_split(meta, model, pre_tokenizer)
    facts = _facts(meta, vocabulary, specials, ())
    if model == "bert":  # as in folders: [CLS] is not called BOS, and a text may begin with one
        facts = replace(facts, bos_token_id=None)

    from sdk.loaders.tokenizer.encoders import unigram_tokenizer, wordpiece_tokenizer
    from sdk.loaders.tokenizer.original_json import tokenizer_json_for

    better = tokenizer_json_for(meta, vocabulary, facts, None)
    if better is not None:
        return better
    separator = specials.separator
    if model == "bert":
        frame = Frame(_some(specials.bos), _some(separator), _some(separator), second_type=1)
        return wordpiece_tokenizer(meta, vocabulary, facts, specials.unknown, frame)
    bos = specials.bos if meta.flag("tokenizer.ggml.add_bos_token", False) else None
    eos = specials.eos if meta.flag("tokenizer.ggml.add_eos_token", True) else None
    frame = Frame(_some(bos), _some(eos), _some(eos, _separator(meta, specials, True)))
    return unigram_tokenizer(meta, vocabulary, facts, specials.unknown, frame)


def _some(*ids: int | None) -> tuple[int, ...]:
    return tuple(token_id for token_id in ids if token_id is not None)


def _separator(meta: Metadata, specials: _Specials, usual: bool) -> int | None:
    """The token between two texts, after the one that ends the first."""
    return specials.separator if meta.flag("tokenizer.ggml.add_sep_token", usual) else None


def _tokens(meta: Metadata) -> tuple[list[str], bytearray]:
    """The spelling and type of every token."""
    key = "tokenizer.ggml.tokens"
    tokens = meta.strings(key)
    if not tokens:
        raise meta.error(key, "the vocabulary", "no such key" if tokens is None else "no tokens")
    if "" in tokens:  # llama.cpp's spelling of a gap in the vocabulary
        tokens = [text or f"[EMPTY_{i}]" for i, text in enumerate(tokens)]
    types = meta.numbers("tokenizer.ggml.token_type", len(tokens), "iu")
    if types is None:
        return tokens, bytearray([NORMAL]) * len(tokens)
    wrong = np.flatnonzero((types < 0) | (types > BYTE))
    if len(wrong):
        where = f"tokenizer.ggml.token_type[{wrong[0]}]"
        raise meta.error(where, f"a type from 0 to {BYTE}", int(types[wrong[0]]))
    for index in np.flatnonzero(types == BYTE).tolist():
        if not _BYTE_TOKEN.fullmatch(tokens[index]):
            raise meta.error(f"{key}[{index}]", "a byte token <0x00> to <0xFF>", tokens[index])
    return tokens, bytearray(types.astype(np.uint8).tobytes())


def _specials(meta: Metadata, model: str, ids: Mapping[str, int], kinds: bytearray) -> _Specials:
    """The special ids; also marks tokens that the file calls special as control in ``kinds``."""
    count, defaults = len(kinds), _DEFAULT_IDS.get(model, {})

    def named(name: str) -> int | None:
        token_id = meta.token_id(f"tokenizer.ggml.{name}_token_id", count)
        if token_id is None and (default := defaults.get(name, count)) < count:
            return default
        return token_id

    bos, eos, unknown = named("bos"), named("eos"), named("unknown")
    separator, padding, mask = named("seperator"), named("padding"), named("mask")
    if model in _ENCODERS:
        for token_id in (bos, eos, unknown, separator, padding, mask):
            if token_id is not None and kinds[token_id] == NORMAL:
                kinds[token_id] = CONTROL
    ends = {token_id for token_id in (eos, named("eot"), named("eom")) if token_id is not None}
    by_name = end_token_ids(ids.get, lambda token_id: kinds[token_id] == CONTROL)
    for token_id in by_name:
        kinds[token_id] = CONTROL
    # Of RWKV "\n\n" ends an answer, and texts have it, too.
    for token_id in ends if bos is None else {bos, *ends}:
        if kinds[token_id] == NORMAL and model != "rwkv":
            kinds[token_id] = CONTROL
    return _Specials(bos, eos, unknown, padding, separator, mask, frozenset(ends | by_name))


def _plain(
    tokens: Sequence[str], ids: dict[str, int], kinds: bytearray, model: str
) -> tuple[dict[str, int], dict[str, int]]:
    """``ids`` without the tokens that text never becomes, and those.

    Text becomes no control token by merging ("<" + "s" + ">"), nor by being a whole word
    (ignore_merges), and with "llama" and "plamo2" no byte token. ``ids`` itself is changed: a copy
    of 262,144 entries takes 10 MiB.
    """
    others: dict[str, int] = {}
    of_bytes = (BYTE,) if model in ("llama", "plamo2") else ()
    for kind in (CONTROL, UNKNOWN, *of_bytes):
        for _, text in of_kind(tokens, bytes(kinds), kind):
            others[text] = ids.pop(text)
    return ids, others


def _facts(
    meta: Metadata, vocabulary: Vocabulary, specials: _Specials, warnings: Sequence[str]
) -> TokenizerFacts:
    named = {
        key.removeprefix(_TEMPLATE + "."): source
        for key in meta.names()
        if key.startswith(_TEMPLATE + ".") and (source := meta.template(key)) is not None
    }
    names = {
        f"{name}_token": vocabulary.tokens[token_id]
        for name, token_id in (
            ("bos", specials.bos),
            ("eos", specials.eos),
            ("unk", specials.unknown),
            ("pad", specials.padding),
            ("sep", specials.separator),
            ("mask", specials.mask),
        )
        if token_id is not None
    }
    kinds = np.frombuffer(vocabulary.kinds, np.uint8)
    special = np.flatnonzero((kinds == CONTROL) | (kinds == UNKNOWN)).tolist()
    return TokenizerFacts(
        bos_token_id=specials.bos,
        eos_token_ids=specials.ends,
        special_ids=frozenset(special),
        chat_template=meta.template(_TEMPLATE) or named.pop("default", None),
        chat_templates=named,
        names=names,
        fim=fim_tokens(vocabulary.ids.get, named_fim_tokens(meta, len(vocabulary.tokens))),
        warnings=tuple(warnings),
    )


def _pre_tokenizer(
    meta: Metadata, model: str, asked: str | None, warnings: list[str]
) -> PreTokenizer | None:
    """How texts are split into words; ``None``: the file names a split that is not known here.

    A file without a name is older than such names. llama.cpp splits as by default then.
    """
    if asked is not None:
        return _asked_split(meta, model, asked)
    if model in ("llama", "rwkv", "plamo2"):
        return DEFAULT
    if model == "gemma4":
        return PRE_TOKENIZERS["gemma4"]
    name = meta.text(_PRE)
    if name is None:
        warnings.append(
            f"{_PRE} is missing: texts are split into words as by default, which may give other "
            "tokens than the model knows; pre_tokenizer= names the right split"
        )
        return DEFAULT
    return PRE_TOKENIZERS.get(name)


def _asked_split(meta: Metadata, model: str, name: str) -> PreTokenizer:
    if model != "gpt2":
        raise UnsupportedError(
            f"{meta.file}: pre_tokenizer={name!r}: expected a file whose tokenizer.ggml.model is "
            f"'gpt2', found {model!r}, which splits no words"
        )
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{meta.file}: pre_tokenizer: expected one of {', '.join(sorted(PRE_TOKENIZERS))}, "
            f"found {name!r}"
        )
    return PRE_TOKENIZERS[name]


def _unknown_split(meta: Metadata) -> UnsupportedError:
    return UnsupportedError(
        f"{meta.file}: {_PRE} is {str(meta.text(_PRE))[:80]!r}, which is not known here: with "
        "another split into words the model would get wrong tokens. Put the model's "
        "tokenizer.json next to the file, or pass tokenizer=FOLDER, or "
        "pre_tokenizer='default' (or another name) to use a split that is known"
    )


def _scores(meta: Metadata, vocabulary: Vocabulary, *, nan: bool) -> NDArray[np.generic]:
    """``nan``: whether scores may be no numbers."""
    scores = meta.numbers("tokenizer.ggml.scores", len(vocabulary.tokens), "fiu")
    if scores is None:
        raise meta.error("tokenizer.ggml.scores", "the scores of the tokens", "no such key")
    if not nan and bool(np.isnan(scores).any()):
        index = int(np.flatnonzero(np.isnan(scores))[0])
        raise meta.error(f"tokenizer.ggml.scores[{index}]", "a number", "NaN")
    return scores


def _byte_ids(vocabulary: Vocabulary) -> list[int | None]:
    """The token of each byte 0 to 255, or None."""
    kinds = np.frombuffer(vocabulary.kinds, np.uint8)
    found: list[int | None] = [None] * 256
    for token_id in np.flatnonzero(kinds == BYTE).tolist():
        found[int(vocabulary.tokens[token_id][3:5], 16)] = token_id
    return found


def _bpe(
    meta: Metadata,
    vocabulary: Vocabulary,
    pieces: Mapping[str, int],
    pre: PreTokenizer,
) -> EncodeText:
    key = "tokenizer.ggml.merges"
    lines = meta.strings(key)
    if lines is None:
        raise meta.error(key, "the merges of a byte-level BPE", "no such key")
    package(
        "tokenizers", f"{meta.file}: its tokenizer needs"
    )  # what fails below is the file's fault
    build = raw_encoder if pre.raw else partial(byte_level_encoder, pre=pre)
    try:
        return build(pieces, _Merges(lines))
    except Exception:  # the library raises plain Exception; what it found is looked for here
        pairs = _pairs(meta, key, lines, vocabulary.ids)
    # Some merges lead to a control token: without them it is like any other control token.
    control = vocabulary.ids.keys() - pieces.keys()
    pairs = [pair for pair in pairs if control.isdisjoint((*pair, pair[0] + pair[1]))]
    try:
        return build(pieces, pairs)
    except Exception as error:
        raise meta.error(key, "a usable vocabulary and merges", error) from None


class _Merges(Sequence[tuple[str, str]]):
    """Lines with one space each, read as pairs that are created on access.

    A list of 50,000 tuples would start a full garbage collection: 40 ms with torch's objects.
    """

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self._lines[index].split(" "))

    def __iter__(self) -> Iterator[Any]:
        return map(tuple, map(str.split, self._lines, repeat(" ")))


def _pairs(
    meta: Metadata, key: str, lines: list[str], ids: Mapping[str, int]
) -> list[tuple[str, str]]:
    """The merges one by one; the first space after a character separates the two pieces.

    :raises CheckpointError: a merge is not of two pieces of the vocabulary.
    """
    pairs: list[tuple[str, str]] = []
    for index, line in enumerate(lines):
        cut = line.find(" ", 1)
        if not 0 < cut < len(line) - 1:
            found = repr(line)[:80]
            raise meta.error(f"{key}[{index}]", "two pieces separated by a space", found)
        left, right = line[:cut], line[cut + 1 :]
        for piece in (left, right, left + right):
            if piece not in ids:
                raise meta.error(f"{key}[{index}]", "pieces of the vocabulary", repr(piece))
        pairs.append((left, right))
    return pairs


def _rstrip_ids(meta: Metadata, vocabulary: Vocabulary) -> frozenset[int]:
    """Tokens that absorb the white space after them: Phi-3's except three, not named by files."""
    name = (meta.text("general.name") or "").lower()
    if "phi-3" not in name and "phi3" not in name:
        return frozenset()
    found = {
        i for i, kind in enumerate(vocabulary.kinds) if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    }
    return frozenset(found - {vocabulary.ids.get(t) for t in ("<unk>", "<s>", "<|endoftext|>")})
