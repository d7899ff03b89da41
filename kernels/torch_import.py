"""Imports torch so that Ctrl-C during the import is an ordinary KeyboardInterrupt.

Importing torch takes a second and runs Python from C++ code that must not be interrupted: an
interrupt there aborts the process ("terminate called after throwing an instance of
pybind11::error_already_set"), and one inside a weakref callback of the import system is lost.
Python raises interrupts only in the main thread. So another thread imports while that one waits.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from queue import SimpleQueue


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
