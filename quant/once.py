"""A value that is made with its first use."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Once(Generic[_T]):
    """Called with ``make``, returns what it returned: it is called once, by the first thread that
    asks, and others wait. If it raises, the next call tries again.

    Requests are read on the threads of their callers, so the first ones come at one time: without
    a lock each of them made the value (a vocabulary for structures takes up to 155 MiB).
    """

    __slots__ = ("_lock", "_value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._value: tuple[_T] | None = None

    def __call__(self, make: Callable[[], _T]) -> _T:
        value = self._value
        if value is None:
            with self._lock:
                value = self._value
                if value is None:
                    value = self._value = (make(),)
        return value[0]

    @property
    def made(self) -> bool:
        """Whether the value is there."""
        return self._value is not None
