"""Safe printing of a caller's values and exceptions in error messages.

A caller's ``repr`` may raise or return a gigabyte, and Python refuses to print an integer of more
than 4,300 digits. A caller's text may hold half a character.
"""

from __future__ import annotations

import re
import reprlib

_VALUE_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    OSError,
    RuntimeError,
    MemoryError,
)
_LONE = re.compile(r"[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]")
_MAX_BITS = 512  # longer integers are described, not printed


class _Brief(reprlib.Repr):
    """``repr`` of the beginning of a value; never raises an ``Exception``."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = limit
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = 16
        self.maxdeque = self.maxarray = 16
        self.maxlevel = 3

    def repr1(self, x: object, level: int) -> str:
        try:
            return super().repr1(x, level)
        except Exception as error:
            return f"<{type(x).__name__} whose repr raises {type(error).__name__}>"

    def repr_instance(self, x: object, level: int) -> str:
        if isinstance(x, bytes | bytearray):
            x = x[: self.maxstring]
        return repr(x)

    repr_bytes = repr_bytearray = repr_instance

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > _MAX_BITS:
            return f"<{'a negative' if x < 0 else 'an'} integer of {x.bit_length()} bits>"
        return repr(x)


def safe_repr(value: object, limit: int = 80) -> str:
    """``repr(value)``, cut to ``limit`` characters."""
    text = _Brief(limit).repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."


def lone_surrogate(text: str) -> str | None:
    """The first half of a surrogate pair without its other half: such a text has no UTF-8."""
    found = None if text.isascii() else _LONE.search(text)
    return None if found is None else ascii(found[0])


def is_value_error(error: BaseException) -> bool:
    """Whether an exception means that the value being read is invalid.

    Other exceptions, such as TimeoutError or the host's own types, may come from a signal handler
    that ran in the meantime, and must reach the host.
    """
    return isinstance(error, _VALUE_ERRORS) and not isinstance(error, TimeoutError)


def safe_message(error: BaseException, limit: int = 300) -> str:
    """``Type: message`` of an exception raised by a caller's object or a library."""
    try:
        text = str(error)
    except Exception:
        text = "(its message cannot be printed)"
    return f"{type(error).__name__}: {text}"[:limit]
