"""The memory of this machine: how much is installed, how much is free, and returning some."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from pathlib import Path
from typing import Any

from sdk.api.control_groups import group_memory


def available_memory() -> int:
    """Bytes this process can still get: the kernel's estimate, or less if a container's limit
    leaves less. All of RAM if the system has no estimate."""
    machine = _ram()
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                machine = int(line.split()[1]) * 1024
    group = group_memory()
    return machine if group is None else min(machine, group.available)


def installed_memory() -> int:
    """Bytes of RAM of this machine, or a container's limit if that is less."""
    group = group_memory()
    return _ram() if group is None else min(_ram(), group.limit)


def _ram() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def release_free_memory() -> None:
    """Return the C allocator's free pages to the system.

    glibc keeps freed memory for the next allocation: 20 to 80 MiB after loading or closing a 100 MB
    model. With other C libraries this does nothing.
    """
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@functools.cache
def _malloc_trim() -> Any:
    """glibc's function; a library that is opened is part of a reference cycle."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/embedlm``, else ``~/.cache/embedlm``. It need not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    base = Path(root) if root and Path(root).is_absolute() else Path.home() / ".cache"
    return base / "embedlm"
