"""Importing torch so that Ctrl-C meanwhile is an ordinary KeyboardInterrupt.

Torch's import takes a second and runs Python from C++ that must not be interrupted: an interrupt
that arrives there aborts the process ("terminate called after throwing an instance of
pybind11::error_already_set"), and one inside a weakref's callback of the import system is dropped.
Python raises interrupts in the main thread alone. So another thread imports while that one waits.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from queue import SimpleQueue


def import_torch() -> None:
    """Have torch imported. No error is raised here: importing it again raises the same one."""
    if "torch" in sys.modules or threading.current_thread() is not threading.main_thread():
        return
    done: SimpleQueue[None] = SimpleQueue()

    def work() -> None:
        try:
            with suppress(Exception):
                import torch  # noqa: F401
        finally:
            done.put(None)

    with suppress(RuntimeError):  # no thread is to be had: whoever needs torch imports it
        # No daemon: a process that ends meanwhile waits for it, instead of being aborted.
        threading.Thread(target=work, name="sdk-import").start()
        done.get()
