"""What stands in for NCCL where there is no GPU; workers import it by name."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

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
    """What waits for a card: an exchange that fails does not end before an abort."""

    def __init__(self, inner: Any, over: threading.Event) -> None:
        self._inner, self._over = inner, over

    def _wait(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._inner.wait()
            self._done.set()

    def wait(self) -> None:
        self._done = threading.Event()
        threading.Thread(target=self._wait, daemon=True).start()
        for _ in range(3000):
            if self._done.wait(0.01) or self._over.is_set():
                return
        raise AssertionError("nobody aborted the exchange")


class Deaf:
    """Gloo, in which a lost rank raises nothing: as with NCCL the others wait until an abort."""

    #: Gloo's destructor would wait for exchanges in progress, which it cannot abort.
    kept: ClassVar[list[Any]] = []

    def __init__(self, inner: Any) -> None:
        self.kept.append(inner)
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
