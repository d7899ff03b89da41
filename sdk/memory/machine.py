"""The memory of this machine: what there is of it, what is free, and giving back."""

from __future__ import annotations

import contextlib
import ctypes
import os

from sdk.memory.control_groups import group_memory


def available_memory() -> int:
    """Bytes this process can still get: the kernel's estimate, or less where a container's limit
    leaves less; all of RAM where the system estimates nothing."""
    machine = _ram()
    with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                machine = int(line.split()[1]) * 1024
    group = group_memory()
    return machine if group is None else min(machine, group.available)


def installed_memory() -> int:
    """Bytes of RAM this machine has, or those that a container's limit allows of it."""
    group = group_memory()
    return _ram() if group is None else min(_ram(), group.limit)


def _ram() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def release_free_memory() -> None:
    """Hand the C allocator's free pages back to the system.

    glibc keeps what was freed for the next allocation: 20 to 80 MiB after a load or a close of a
    100 MB model. Elsewhere this does nothing.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
