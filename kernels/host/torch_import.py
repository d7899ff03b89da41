"""Whether torch is imported, and its import, which Ctrl-C may interrupt.

Importing torch takes a second and runs Python from C++ code that must not be interrupted: an
interrupt there aborts the process ("terminate called after throwing an instance of
pybind11::error_already_set"), and one inside a weakref callback of the import system is lost.
Python raises interrupts only in the main thread. So another thread imports while that one waits.
"""

from __future__ import annotations

import importlib
import sys
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from sdk.kernels.packages import missing


class _Mode(threading.local):
    """Whether this thread stays without torch, though another thread may import it."""

    without_torch = False


_mode = _Mode()


def loaded_torch() -> Any:
    """torch if it is imported as a whole, else ``None``."""
    module = sys.modules.get("torch")
    if module is None or _mode.without_torch or getattr(module.__spec__, "_initializing", False):
        return None
    return module


class one_mode:
    """Inside, torch does not appear in this thread because another thread imports it: half of a
    step would compute with types that the other half does not know."""

    def __enter__(self) -> None:
        self._before = _mode.without_torch
        _mode.without_torch = loaded_torch() is None

    def __exit__(self, *error: object) -> None:
        # Not if something inside needed torch (torch_module).
        _mode.without_torch = self._before and _mode.without_torch


def torch_module(what: str) -> Any:
    """torch, imported now if nobody has, because ``what`` needs it.

    :raises MissingPackageError: it is not installed, or broken.
    """
    _mode.without_torch = False
    import_torch()
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise missing(error, f"{what} needs") from error


def import_torch() -> None:
    """Import torch. Raises nothing: importing it again raises the same error."""
    if "torch" in sys.modules or threading.current_thread() is not threading.main_thread():
        return
    done: SimpleQueue[None] = SimpleQueue()

    def work() -> None:
        try:
            with suppress(Exception):
                import torch  # noqa: F401
        finally:
            done.put(None)

    with suppress(RuntimeError):  # no thread can be started: torch is imported where it is needed
        # Not a daemon: a process that ends meanwhile waits for it instead of being aborted.
        threading.Thread(target=work, name="sdk-import").start()
        done.get()
