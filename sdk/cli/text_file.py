"""A user's text."""

from __future__ import annotations

from pathlib import Path

from sdk.errors import RequestError


def read_text(path: str) -> str:
    """:raises RequestError: it is no UTF-8 text. :raises OSError: it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise RequestError(f"{path}: expected text in UTF-8, found {where}") from error
