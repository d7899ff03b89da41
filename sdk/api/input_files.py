"""Files that options name: an error states the option, the file and what was expected."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from sdk.api.errors import RequestError

Name = str | os.PathLike[str]
#: How a command uses a file that it may also create.
USED = "read and written"


@contextlib.contextmanager
def reading(option: str, path: Name, expected: str, how: str = "read") -> Iterator[None]:
    """Turns an ``OSError`` of the block, which uses the file of an option and nothing else, into
    one that states the option, the path and what was expected.

    :raises RequestError: ``path`` is missing, is a folder, or cannot be ``how``.
    """
    try:
        yield
    except OSError as error:
        raise unreadable(option, path, expected, error, how) from error


def unreadable(
    option: str, path: Name, expected: str, error: Exception, how: str = "read"
) -> RequestError:
    """The error of an option whose file cannot be read because of ``error``."""
    reason = error.strerror if isinstance(error, OSError) else error
    found = os.fspath(path)[:200]
    return RequestError(
        f"{option}: expected {expected}, found {found!r}, which cannot be {how} ({reason})"
    )


def read_text(option: str, path: Name, expected: str = "a file of text in UTF-8") -> str:
    """The text of the file of an option.

    :raises RequestError: it cannot be read, or is not UTF-8.
    """
    try:
        with reading(option, path, expected):
            return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise not_utf8(option, path, error) from error


def not_utf8(option: str, path: Name, error: UnicodeDecodeError) -> RequestError:
    """The error of an option whose file is not text in UTF-8."""
    where = f"{error.reason} at byte {error.start}"
    return RequestError(f"{option}: expected text in UTF-8, found {where} of {os.fspath(path)}")
