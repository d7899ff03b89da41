"""What stands in for NCCL where there is no GPU; workers import it by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d

_c10d: Any = _distributed_c10d


def gloo(store: Any, rank: int, size: int) -> Any:
    """Real sums and transfers, between real processes or threads."""
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=60)
    options._threads = 1
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return _c10d.ProcessGroupGloo(store, rank, size, options)


class _Work:
    """What waits for a card: an exchange that fails does not end by itself."""

    def __init__(self, inner: Any, aborted: threading.Event) -> None:
        self._inner, self._aborted = inner, aborted

    def wait(self) -> None:
        try:
            self._inner.wait()
        except RuntimeError:
            assert self._aborted.wait(30), "nobody aborted the exchange"


class Deaf:
    """Gloo, in which a lost rank is no error: as with NCCL the others wait until an abort."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._aborted = threading.Event()
        self.size = inner.size

    def abort(self) -> None:
        self._aborted.set()

    def __getattr__(self, name: str) -> Callable[..., _Work]:
        begin = getattr(self._inner, name)
        return lambda *args: _Work(begin(*args), self._aborted)


def deaf(store: Any, rank: int, size: int) -> Any:
    return Deaf(gloo(store, rank, size))


class Noted:
    """Passes all calls on, and notes what NCCL would get: operation, shapes, types, order."""

    def __init__(self, inner: Any, calls: list[tuple[Any, ...]]) -> None:
        self._inner, self._calls = inner, calls
        self.size = inner.size

    def __getattr__(self, name: str) -> Callable[..., Any]:
        begin = getattr(self._inner, name)
        if name == "abort":
            return begin

        def call(*args: Any) -> Any:
            tensors = [x for arg in args for x in (arg if isinstance(arg, list) else [arg])]
            facts = [
                (tuple(x.shape), x.dtype, x.device.type, x.is_contiguous())
                for x in tensors
                if isinstance(x, Tensor)
            ]
            self._calls.append((name, *facts))
            return begin(*args)

        return call
