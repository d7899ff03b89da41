"""The memory of this machine: how much is installed, how much is free, and returning some."""

from __future__ import annotations

import os
from pathlib import Path

from sdk.kernels.system import SYSTEM


def available_memory() -> int:
    """Bytes this process can still get: the system's estimate, or less if a container's limit
    leaves less. All of RAM if the system has no estimate."""
    machine, group = SYSTEM.available_ram(), SYSTEM.memory_limit()
    return machine if group is None else min(machine, group.available)


def installed_memory() -> int:
    """Bytes of RAM of this machine, or a container's limit if that is less."""
    machine, group = SYSTEM.installed_ram(), SYSTEM.memory_limit()
    return machine if group is None else min(machine, group.limit)


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/embedlm``, else ``~/.cache/embedlm``. It need not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification says to ignore relative paths.
    base = Path(root) if root and Path(root).is_absolute() else Path.home() / ".cache"
    return base / "embedlm"
