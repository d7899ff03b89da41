"""Options of ``embedlm run`` for answers that follow a schema, a pattern, a grammar or a choice."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk.api.errors import RequestError
from sdk.api.input_files import not_utf8, unreadable

if TYPE_CHECKING:
    from sdk.api.structured_params import StructuredOutputsParams

#: Bytes of a file that are read: more than the longest schema or grammar that is accepted.
_MOST_BYTES = 2**22
_NAMES = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}


def add_structure_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--json-schema``, ``--regex``, ``--choice`` and ``--grammar``; only one may be given."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--json-schema", metavar="FILE_OR_JSON", help="the answer is JSON of this schema"
    )
    group.add_argument("--regex", metavar="PATTERN", help="the whole answer matches the pattern")
    group.add_argument(
        "--choice", metavar="TEXT", action="append", help="the answer is this text (repeat it)"
    )
    group.add_argument(
        "--grammar", metavar="FILE_OR_TEXT", help="the answer follows a grammar (Lark or GBNF)"
    )


def structure(args: argparse.Namespace) -> StructuredOutputsParams | None:
    """The structure that was asked for, if any.

    :raises RequestError: it is invalid, a file cannot be read, or llguidance is not installed.
    """
    for option, name in _NAMES.items():
        value = getattr(args, option)
        if value is not None:
            return _structure(f"--{option.replace('_', '-')}", name, value)
    return None


def _structure(option: str, name: str, value: Any) -> StructuredOutputsParams:
    from sdk.api.structured_params import StructuredOutputsParams
    from sdk.structured.library import library

    if name == "json" and not value.lstrip().startswith("{"):
        value = _read(option, value, "JSON (it begins with '{')")
    elif name == "grammar" and (":" not in value or _exists(value)):
        value = _read(option, value, "the text of a grammar")
    try:
        library()  # llguidance is installed
        return StructuredOutputsParams(**{name: value})
    except RequestError as error:
        raise RequestError(f"{option}: {str(error).removeprefix(f'{name}: ')}") from None


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # too long for a name: a grammar
        return False


def _read(option: str, path: str, other: str) -> str:
    """The text of a file, which may be a pipe."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise unreadable(option, path, f"a file or {other}", error) from None
    if len(data) > _MOST_BYTES:
        raise RequestError(f"{option}: expected a file of at most {_MOST_BYTES} bytes: {path}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(option, path, error) from None
