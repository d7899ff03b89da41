"""Unnamed files with reserved disk space, for offloaded weights and swapped pages."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from sdk.api.errors import OutOfMemoryError
from sdk.api.sizes import format_bytes
from sdk.kernels.system import SYSTEM


def reserved_file(option: str, folder: str, size: int, what: str) -> Any:
    """A file in ``folder`` with ``size`` bytes reserved for ``what``; it is deleted once unused.

    :raises OutOfMemoryError: it cannot be created, or the disk is too full. Names ``option``.
    """
    try:
        file = tempfile.TemporaryFile(prefix="embedlm-", dir=folder)  # noqa: SIM115
    except OSError as error:
        raise OutOfMemoryError(f"{option}: cannot create a file in {folder}: {error}") from error
    try:
        SYSTEM.reserve_space(file.fileno(), 0, size)
    except OSError as error:
        file.close()
        free = format_bytes(shutil.disk_usage(folder).free)
        raise OutOfMemoryError(
            f"{option}: {folder} has no room for {format_bytes(size)} of {what}: {free} are free "
            f"({error})"
        ) from error
    return file


def disk_space_problem(option: str, folder: str, size: int, what: str) -> str:
    """Why :func:`reserved_file` would fail, as far as it is known without writing; else empty."""
    if not Path(folder).is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return f"{option}: cannot create a file in {folder}: it is not a writable folder"
    free = shutil.disk_usage(folder).free
    if size <= free:
        return ""
    return (
        f"{option}: {folder} has no room for {format_bytes(size)} of {what}: "
        f"{format_bytes(free)} are free"
    )


def disk_folder(given: str | None) -> str:
    """The folder for weights: ``given``, or the first folder for temporary files on a disk.

    :raises OutOfMemoryError: the folder's files would be in memory.
    """
    folders = [given] if given is not None else [tempfile.gettempdir(), "/var/tmp"]
    for folder in folders:
        if (given is not None or Path(folder).is_dir()) and not SYSTEM.is_in_memory(folder):
            return folder
    raise OutOfMemoryError(
        f"disk_offload: files in {' and '.join(folders)} are kept in memory; "
        "set disk_offload_path to a folder on a disk"
    )
