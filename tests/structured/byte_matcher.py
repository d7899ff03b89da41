"""Matchers for a vocabulary of single bytes: what a structure accepts, without a model."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from sdk.api.structured_params import StructuredOutputsParams
from sdk.structured.definition import definition_of
from sdk.structured.library import Matcher, Vocabulary

END = 256


@functools.cache
def vocabulary() -> Vocabulary:
    tokens = [bytes([byte]) for byte in range(256)] + [b"\xff</s>"]
    return Vocabulary(tokens, [END], lambda text: list(text.encode()))


def matcher_of(**structure: Any) -> Matcher:
    """A matcher for a structure as a request has it."""
    definition = definition_of(StructuredOutputsParams(**structure), lambda text: False)
    return Matcher.of(vocabulary(), definition.kind, definition.text)


def accepts(matcher: Matcher, text: str) -> bool:
    """Whether a text follows a structure as a whole."""
    tokens = list(text.encode())
    return matcher.allowed((*tokens, END)) > len(tokens)


def allows(matcher: Matcher, value: Any) -> bool:
    """Whether a value is an answer."""
    return accepts(matcher, value if isinstance(value, str) else json.dumps(value))


def texts(matcher: Matcher, most: int, over: bytes) -> Iterator[str]:
    """All answers of up to ``most`` bytes of an alphabet."""
    mask = np.zeros(9, np.uint32)

    def walk(text: bytes) -> Iterator[str]:
        if matcher.accepting:
            yield text.decode()
        if len(text) == most or matcher.stopped:
            return
        matcher.mask(mask)
        found = [byte for byte in over if int(mask[byte >> 5]) >> (byte & 31) & 1]
        for byte in found:
            matcher.consume((byte,))
            yield from walk(text + bytes([byte]))
            matcher.rollback(1)

    yield from walk(b"")
