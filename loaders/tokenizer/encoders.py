"""The tokenizers of encoders in GGUF files, built for the ``tokenizers`` library.

``bert`` is WordPiece: a word begins with ``▁`` in the file, and its other pieces have no mark; the
library marks those with ``##`` instead. ``t5`` is Unigram (XLM-R, T5): pieces with scores, and the
normalization of SentencePiece as a compiled map of characters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from sdk.kernels.packages import package
from sdk.loaders.tokenizer.base import Frame, TokenizerFacts
from sdk.loaders.tokenizer.hf import JsonTokenizer
from sdk.loaders.tokenizer.json_parts import check_parts, library_error
from sdk.loaders.tokenizer.metadata import Metadata
from sdk.loaders.tokenizer.spm import SPACE
from sdk.loaders.tokenizer.vocab import CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, Vocabulary

_MAX_WORD = 100  # characters; WordPiece reads a longer word as unknown, as BERT does
_MAX_CHARSMAP = 8 * 1024 * 1024  # XLM-R's is 0.3 MB
_BRACKETS = re.compile(r"\[.*\]")


def respelled(tokens: Sequence[str], kinds: bytes) -> list[str]:
    """WordPiece's spellings of the tokens of a ``bert`` file."""
    found: list[str] = []
    for token, kind in zip(tokens, kinds, strict=True):
        if token[:1] == SPACE:
            found.append(token[1:] or token)
        elif kind in (CONTROL, UNKNOWN) or _BRACKETS.fullmatch(token):
            found.append(token)
        else:
            found.append("##" + token)
    return found


def wordpiece_tokenizer(
    meta: Metadata, vocabulary: Vocabulary, facts: TokenizerFacts, unknown: int | None, frame: Frame
) -> JsonTokenizer:
    """The tokenizer of a ``bert`` file. :raises CheckpointError: it lacks a special token."""
    package("tokenizers", f"{meta.file}: its tokenizer needs")
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    for name, found in (
        ("unknown", unknown is not None),
        ("bos", frame.first),
        ("seperator", frame.last),
    ):
        if not found:
            raise meta.error(f"tokenizer.ggml.{name}_token_id", "a token of BERT", "no such key")
    lower = meta.flag("tokenizer.ggml.normalizer.lowercase", True)
    accents = meta.flag("tokenizer.ggml.normalizer.strip_accents", lower)
    backend = Tokenizer(
        models.WordPiece(
            vocab={text: index for index, text in enumerate(vocabulary.tokens)},
            unk_token=vocabulary.tokens[unknown or 0],
            max_input_chars_per_word=_MAX_WORD,
        )
    )
    backend.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=accents)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return _finished(meta, backend, vocabulary, facts, frame)


def unigram_tokenizer(
    meta: Metadata, vocabulary: Vocabulary, facts: TokenizerFacts, unknown: int | None, frame: Frame
) -> JsonTokenizer:
    """The tokenizer of a ``t5`` file.

    :raises CheckpointError: its scores, its map of characters or a special token are damaged.
    """
    package("tokenizers", f"{meta.file}: its tokenizer needs")
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    if unknown is None:
        raise meta.error("tokenizer.ggml.unknown_token_id", "a token id", "no such key")
    backend = _built(meta, lambda: Tokenizer(models.Unigram(_scored(meta, vocabulary), unknown)))
    steps: list[Any] = []
    charsmap = _charsmap(meta)
    if charsmap:
        steps.append(_built(meta, partial(normalizers.Precompiled, charsmap)))
    if meta.flag("tokenizer.ggml.remove_extra_whitespaces", False):
        steps += [
            normalizers.Replace(Regex("^ +| +$"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    backend.normalizer = normalizers.Sequence(steps)
    scheme = "always" if meta.flag("tokenizer.ggml.add_space_prefix", True) else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, scheme, split=True)
    backend.decoder = decoders.Metaspace(SPACE, scheme)
    return _finished(meta, backend, vocabulary, facts, frame)


def _scored(meta: Metadata, vocabulary: Vocabulary) -> list[tuple[str, float]]:
    """The pieces with their scores. No text has a piece with a space in front: those are unused.

    The library takes the lowest score of all for that of an unknown character. Only normal pieces
    may set it: converters give -10,000 to those that pad a vocabulary.
    """
    key = "tokenizer.ggml.scores"
    scores = meta.numbers(key, len(vocabulary.tokens), "fiu")
    if scores is None:
        raise meta.error(key, "the scores of the pieces", "no such key")
    wrong = np.flatnonzero(~np.isfinite(scores.astype(np.float64)))
    if len(wrong):
        raise meta.error(f"{key}[{wrong[0]}]", "a finite number", float(scores[wrong[0]]))
    kinds = np.frombuffer(vocabulary.kinds, np.uint8)
    lowest = scores[kinds == NORMAL].min(initial=0.0)
    kept = np.where(kinds == NORMAL, scores, lowest).tolist()
    spelled = [
        " " + text if kind == UNUSED else text
        for text, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
    ]
    return list(zip(spelled, kept, strict=True))


def _charsmap(meta: Metadata) -> bytes:
    key = "tokenizer.ggml.precompiled_charsmap"
    given = meta.array(key)
    if given is None:
        return b""
    if len(given) > _MAX_CHARSMAP:
        raise meta.error(key, f"at most {_MAX_CHARSMAP} bytes", len(given))
    numbers = meta.numbers(key, len(given), "iu")
    assert numbers is not None
    if len(numbers) and not -128 <= numbers.min() <= numbers.max() <= 255:
        raise meta.error(key, "bytes", f"numbers from {numbers.min()} to {numbers.max()}")
    return (numbers.astype(np.int64) & 255).astype(np.uint8).tobytes()


def _finished(
    meta: Metadata,
    backend: Any,
    vocabulary: Vocabulary,
    facts: TokenizerFacts,
    frame: Frame,
) -> JsonTokenizer:
    """The tokenizer with its added tokens and the special tokens around texts."""
    from tokenizers import AddedToken

    backend.post_processor = _template(vocabulary, frame)
    added = [
        # "<mask>" takes the space before it, as in XLM-R's and MPNet's files
        AddedToken(text, special=kind != USER_DEFINED, normalized=False, lstrip=text == "<mask>")
        for text, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True)
        if kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]
    backend.add_tokens(added)
    check_parts(backend, meta.file)
    return JsonTokenizer(backend, facts, meta.file)


def _template(vocabulary: Vocabulary, frame: Frame) -> Any:
    from tokenizers import processors

    first, last, between = frame.first, frame.last, frame.between
    begin, middle, end = (list(map(str, ids)) for ids in (first, between, last))
    kind = f":{frame.second_type}"
    return processors.TemplateProcessing(
        single=[*begin, "$A", *end],
        pair=[*begin, "$A", *middle, f"$B{kind}", *(name + kind for name in end)],
        special_tokens=[
            {"id": str(token_id), "ids": [token_id], "tokens": [vocabulary.tokens[token_id]]}
            for token_id in sorted({*first, *last, *between})
        ],
    )


def _built(meta: Metadata, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except BaseException as error:
        raise library_error(error, meta.file) from None
