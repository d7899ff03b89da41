"""Files given on the command line: texts to read, results to write."""

from __future__ import annotations

import os
from pathlib import Path

from sdk.api.errors import RequestError


def read_text(path: str) -> str:
    """:raises RequestError: not UTF-8 text. :raises OSError: it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        where = f"{error.reason} at byte {error.start}"
        raise RequestError(f"{path}: expected text in UTF-8, found {where}") from error


def check_writable(option: str, path: str | None) -> None:
    """Call before the work whose result goes there. :raises RequestError: it is not writable."""
    if path is None:
        return
    target = Path(path)
    if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
        raise RequestError(f"{option}: expected a file that can be written, found {path}")
