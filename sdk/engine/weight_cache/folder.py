"""The folder of the cache: which files are there, how old they are, and which of them may stay.

``NAME.uses`` says how often the experts of a model were used (``expert_uses.py``).
``NAME.weights`` is complete, ``NAME.part`` is being written, by the process that has locked it. A
part that nobody has locked is what a process left that was killed. All files belong to the user,
and nobody else may read or write them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.machine import cache_folder
from sdk.kernels.dataclass import dataclass
from sdk.kernels.system import SYSTEM

#: Bytes at the beginning of a file, with what it is for people.
PREAMBLE = 4096
WEIGHTS, PART, USES = ".weights", ".part", ".uses"
#: Files of uses, of 3 KB (6 layers of 128 experts) to 160 KB (60 layers of 384).
_MOST_USES = 32
_NAME = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class CachedWeights:
    """A complete file. ``used``: when a model was last opened with it, in seconds since 1970."""

    name: str
    nbytes: int
    used: float
    about: dict[str, str]


def weights_folder() -> Path:
    """Where the files are. It need not exist yet.

    :raises RuntimeError: this user has no home.
    """
    return cache_folder() / "weights"


def made_folder(folder: Path) -> None:
    """Make the folder. :raises OSError: it cannot be made, or others may write into it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if why := SYSTEM.not_private(folder.stat()):
        raise PermissionError(f"{folder} is not a folder that only this user may write: {why}")


def opened(path: Path) -> int | None:
    """The file, open for reading; ``None``: there is none.

    :raises OSError: it cannot be opened, or others may write it.
    """
    try:
        file = SYSTEM.open_file(path, os.O_RDONLY, follow=False)
    except FileNotFoundError:
        return None
    why = SYSTEM.not_private(os.fstat(file))
    if not why:
        return file
    os.close(file)
    raise PermissionError(f"{path}: others may write it: {why}")


def locked_part(path: Path) -> int | None:
    """The part, empty, locked by this process and open for writing; ``None``: another process
    writes it. :raises OSError: it cannot be written."""
    while True:
        file = SYSTEM.open_file(path, os.O_RDWR | os.O_CREAT, follow=False)
        try:
            if not SYSTEM.lock_file(file):
                os.close(file)
                return None
            if not _is_at(file, path):  # removed or renamed meanwhile
                os.close(file)
                continue
            SYSTEM.make_private(file)
            os.ftruncate(file, 0)
            return file
        except OSError:
            os.close(file)
            raise


def _is_at(file: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), path.stat())
    return False


def entries(folder: Path) -> list[CachedWeights]:
    """The complete files, the one that was used last first."""
    return sorted(_entries(folder), key=lambda one: one.used, reverse=True)


def _entries(folder: Path) -> Iterator[CachedWeights]:
    for path in _files(folder, WEIGHTS):
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            about = _about(path)
            yield CachedWeights(path.name[:32], found.st_size, found.st_mtime, about)


def _files(folder: Path, ending: str) -> list[Path]:
    try:
        names = [one.name for one in folder.iterdir()]
    except FileNotFoundError:
        return []
    return [
        folder / name
        for name in sorted(names)
        if name.endswith(ending) and _NAME.fullmatch(name[: -len(ending)])
    ]


def _about(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            found: Any = json.loads(file.read(PREAMBLE).rstrip(b"\0"))
        return {str(name): str(value) for name, value in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def remove(folder: Path, name: str) -> bool:
    """Remove the file of this name: whether there was one. A process that has mapped it keeps its
    bytes."""
    try:
        (folder / f"{name}{WEIGHTS}").unlink()
    except FileNotFoundError:
        return False
    return True


def prune(folder: Path, most: int, keep: str = "") -> list[CachedWeights]:
    """Remove what was not used for the longest time, until at most ``most`` bytes are left, and
    parts that nobody writes. Returns the removed ones. ``keep``: a name that stays.
    """
    found = entries(folder)
    total, removed = sum(one.nbytes for one in found), []
    for one in reversed(found):
        if total <= most:
            break
        if one.name != keep and remove(folder, one.name):
            removed.append(one)
            total -= one.nbytes
    for path in _files(folder, PART):
        with contextlib.suppress(OSError):
            _remove_left(path)
    return removed


def prune_uses(folder: Path, most: int = _MOST_USES) -> None:
    """Remove what is known of the experts of models, but for those that were used last."""
    found = []
    for path in _files(folder, USES):
        with contextlib.suppress(FileNotFoundError):  # another process removes files, too
            found.append((path.stat().st_mtime, path))
    for _, path in sorted(found, reverse=True)[most:]:
        path.unlink(missing_ok=True)


def remove_uses(folder: Path, name: str) -> None:
    """Remove what is known of the experts of one model, if anything is. ``name`` comes from a file:
    what is not a name of ours is passed over."""
    if _NAME.fullmatch(name):
        (folder / f"{name}{USES}").unlink(missing_ok=True)


def _remove_left(path: Path) -> None:
    """Remove a part whose process has ended."""
    file = SYSTEM.open_file(path, os.O_RDWR, follow=False)
    try:
        if SYSTEM.lock_file(file) and _is_at(file, path):
            path.unlink()
    finally:
        os.close(file)


def named(folder: Path, start: str) -> CachedWeights:
    """The file whose name begins with ``start``, as ``embedlm cache ls`` shows it.

    :raises RequestError: there is none, or several.
    """
    found = [one for one in entries(folder) if one.name.startswith(start)]
    if len(found) == 1 and start:
        return found[0]
    known = ", ".join(one.name[:12] for one in entries(folder)) or "none"
    what = f"{len(found)} begin with {start!r}" if found else f"no weights {start!r}"
    raise RequestError(f"{folder}: {what}; there are {known}")
