"""Typed access to GGUF metadata: every value is checked, every error names file and key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sdk.quant.errors import CheckpointError

MAX_TEMPLATE_BYTES = 64 * 1024


class Metadata:
    """The key -> value pairs of one file. Missing keys read as None."""

    def __init__(self, values: Mapping[str, object], file: str) -> None:
        self._values = values
        self.file = file

    def error(self, key: str, expected: object, found: object) -> CheckpointError:
        return CheckpointError(f"{self.file}: {key}: expected {expected}, found {found}")

    def names(self) -> list[str]:
        return list(self._values)

    def text(self, key: str) -> str | None:
        value = self._values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.error(key, "a string", _brief(value))
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, (bool, np.bool_)):
            raise self.error(key, "a bool", _brief(value))
        return bool(value)

    def token_id(self, key: str, count: int) -> int | None:
        """An id in a vocabulary of ``count`` tokens."""
        value = self._values.get(key)
        if value is None:
            return None
        if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)):
            raise self.error(key, "a token id", _brief(value))
        if not 0 <= int(value) < count:
            raise self.error(key, f"an id from 0 to {count - 1}", int(value))
        return int(value)

    def strings(self, key: str) -> list[str] | None:
        value = self.array(key)
        if value is None:
            return None
        strings = list(value)
        if set(map(type, strings)) - {str}:
            index = next(i for i, item in enumerate(strings) if type(item) is not str)
            raise self.error(f"{key}[{index}]", "a string", _brief(strings[index]))
        return strings

    def numbers(self, key: str, count: int, kinds: str) -> np.ndarray[Any, Any] | None:
        """An array of ``count`` numbers; ``kinds``: the numpy kind characters allowed."""
        value = self.array(key)
        if value is None:
            return None
        if len(value) != count:
            raise self.error(key, f"{count} values (one per token)", len(value))
        try:
            numbers = np.asarray(value)
        except (ValueError, OverflowError):
            raise self.error(key, "numbers", "a ragged array") from None
        if numbers.ndim != 1 or (count and numbers.dtype.kind not in kinds):
            raise self.error(key, "an array of numbers", f"an array of {numbers.dtype}")
        return numbers

    def template(self, key: str) -> str | None:
        """A chat template, of bounded size."""
        source = self.text(key)
        if source is not None and len(source.encode("utf-8", "replace")) > MAX_TEMPLATE_BYTES:
            size = len(source.encode("utf-8", "replace"))
            raise self.error(key, f"a template of at most {MAX_TEMPLATE_BYTES} bytes", size)
        return source

    def array(self, key: str) -> Any:
        """A list, a tuple or a numpy array."""
        value = self._values.get(key)
        if value is not None and not isinstance(value, (list, tuple, np.ndarray)):
            raise self.error(key, "an array", _brief(value))
        return value


def _brief(value: object) -> str:
    shown = repr(value)
    return f"{type(value).__name__} {shown if len(shown) <= 80 else shown[:77] + '...'}"
