"""Compiles the kernels of code that runs, instead of launching them: several at a time, in threads.

Triton compiles a kernel when it is first launched, so an engine's 33 to 40 kernels would be
compiled one after the other. Inside :func:`compiling_ahead`, ``run_kernel`` only hands a kernel to
Triton's ``AsyncCompileMode``. What the code computes is then meaningless, so it runs a second time
afterwards.

Threads are enough: passes of MLIR and LLVM release Python's lock, and ptxas is a process of its
own. Of the time of a kernel for sm_90 the lock is held for a quarter, while its syntax tree is read
(docs/log.md, 2026-11-28).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import triton

from sdk.kernels.system import SYSTEM

#: Threads at most: ptxas takes 50 to 200 MB for a kernel.
_MOST_THREADS = 8
#: ``(done, total)`` kernels.
Report = Callable[[int, int], None]
#: Whether launches of this thread are to be compiled only.
ONLY_COMPILES: ContextVar[bool] = ContextVar("only_compiles", default=False)


class _Threads(ThreadPoolExecutor):
    """Keeps what was submitted."""

    def __init__(self) -> None:
        count = min(SYSTEM.num_cpus(), _MOST_THREADS)
        super().__init__(count, thread_name_prefix="embedlm-compile")
        self.futures: list[Future[Any]] = []

    def submit(self, function: Any, /, *args: Any, **named: Any) -> Future[Any]:
        future = super().submit(function, *args, **named)
        self.futures.append(future)
        return future


def can_compile_ahead() -> bool:
    """Whether Triton compiles here, and can do so in threads: not in its interpreter, not in
    versions without that mode, and not while the caller compiles kernels of its own like this."""
    try:
        from triton.runtime import _async_compile
    except ImportError:
        return False
    return not triton.knobs.runtime.interpret and _async_compile.active_mode.get() is None


@contextmanager
def compiling_ahead(report: Report | None = None) -> Iterator[None]:
    """Inside, kernels are compiled and not launched; at the end all are compiled. ``report`` may
    raise to cancel: then those that have not begun are left out.

    A kernel that cannot be compiled is passed over: its launch will raise.
    """
    from triton.runtime._async_compile import AsyncCompileMode

    with _Threads() as threads, AsyncCompileMode(threads, ignore_errors=True):
        try:
            token = ONLY_COMPILES.set(True)
            try:
                yield
            finally:
                ONLY_COMPILES.reset(token)
            total = len(threads.futures)
            for done, _ in enumerate(as_completed(threads.futures), 1):
                if report is not None:
                    report(done, total)
        except BaseException:
            for future in threads.futures:
                future.cancel()
            raise
