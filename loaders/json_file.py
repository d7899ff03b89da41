"""Reads untrusted JSON: bounded in size, depth and digits; no NaN and no duplicate keys."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from sdk.quant.errors import CheckpointError

#: Brackets a document may have. A header of 400,000 tensors has 1.2 million. An empty list takes 56
#: bytes, so a document of nothing but brackets takes at most 200 MB.
MAX_BRACKETS = 3 << 20
#: No size, count or offset has more digits than 2^64, and int() of a million digits takes minutes.
_MAX_DIGITS = 20
#: For a tokenizer's files: many set the maximum number of tokens to int(1e30).
TOKENIZER_DIGITS = 31


def parse_json(text: bytes, source: str, *, max_digits: int = _MAX_DIGITS) -> dict[str, Any]:
    """Parse a JSON object. ``source`` names the file (and part) in errors.

    Raises:
        CheckpointError: not UTF-8, not JSON, not an object, nested too deeply, a duplicate key,
            NaN or infinity, or an integer of more than ``max_digits`` digits.
    """

    def refuse_constant(name: str) -> NoReturn:
        raise CheckpointError(f"{source}: {name} is not allowed in JSON")

    def parse_integer(digits: str) -> int:
        if len(digits) > max_digits:
            raise CheckpointError(f"{source}: a number of {len(digits)} digits: {digits[:20]}...")
        return int(digits)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{source}: the key {twice!r} occurs twice")
        return values

    if text.count(b"{") + text.count(b"[") > MAX_BRACKETS:
        raise CheckpointError(f"{source}: more than {MAX_BRACKETS} lists and objects")
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=unique,
            parse_constant=refuse_constant,
            parse_int=parse_integer,
        )
    except RecursionError:
        raise CheckpointError(f"{source}: nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{source}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{source}: expected a JSON object, found {type(value).__name__}")
    return value


def read_json(path: Path, limit: int, *, max_digits: int = _MAX_DIGITS) -> dict[str, Any]:
    """Read a JSON file of at most ``limit`` bytes.

    Raises:
        CheckpointError: the file is missing, too large, or invalid (see `parse_json`).
    """
    try:
        with path.open("rb") as file:
            text = file.read(limit + 1)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if len(text) > limit:
        raise CheckpointError(f"{path}: larger than {limit >> 20} MiB")
    return parse_json(text, str(path), max_digits=max_digits)
