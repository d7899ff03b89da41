"""The limits of memory and CPU time of the control groups of this process, as containers have them.

Each group up to the mounted root may have its own limit, and the tightest one counts. A group's
file pages count as free, because the system drops them before it kills a process. ``memory.high``
counts as a limit, because the system slows a process down to a halt beyond it. A quota of CPU time
is for each period (0.1 s unless set): a group that has used it up is stopped until the next one.
Sources: cgroups(7), proc(5), the kernel's cgroup-v2.rst (memory.max, memory.high, memory.current)
and cgroup-v1/memory.rst (memory.limit_in_bytes, memory.usage_in_bytes); cpu.max in cgroup-v2.rst,
cpu.cfs_quota_us and cpu.cfs_period_us in scheduler/sched-bwc.rst.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from sdk.kernels.system.services import MemoryLimit

#: Version 1 expresses "no limit" as the largest number of pages, near 2**63.
_NO_LIMIT = 2**60


class _Files(NamedTuple):
    """The files in which a version of the interface has its numbers."""

    limits: tuple[str, ...]
    used: str
    reclaimable: tuple[str, ...]  # lines of memory.stat


_VERSIONS = {
    "cgroup": _Files(
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
    "cgroup2": _Files(
        ("memory.max", "memory.high"),
        "memory.current",
        ("inactive_file", "active_file", "slab_reclaimable"),
    ),
}


def group_memory(root: Path = Path("/")) -> MemoryLimit | None:
    """``None``: this process has no limit. ``root`` is the folder that contains proc and sys."""
    every = (_memory(folder, _VERSIONS[kind]) for folder, kind in _groups(root, "memory"))
    found = [memory for memory in every if memory is not None]
    if not found:
        return None
    return MemoryLimit(min(m.limit for m in found), min(m.available for m in found))


def group_cpus(root: Path = Path("/")) -> float | None:
    """The CPU time that this process may use, in CPUs (2.5: 2.5 seconds each second); ``None``:
    there is no quota. ``root``: see :func:`group_memory`."""
    found = [_cpus(folder, kind) for folder, kind in _groups(root, "cpu")]
    return min((cpus for cpus in found if cpus is not None), default=None)


def _cpus(folder: Path, kind: str) -> float | None:
    """The quota of one group divided by its period; ``None``: it has none."""
    if kind == "cgroup2":
        words = [word for line in _lines(folder / "cpu.max") for word in line.split()]
    else:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [line for name in names for line in _lines(folder / name)]
    if len(words) != 2 or not all(word.isdigit() and int(word) for word in words):
        return None  # "max", or -1 in version 1
    return int(words[0]) / int(words[1])


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, str]]:
    """The folders of the groups that this process is in, from its own up to the mounted root, and
    the type of their file system."""
    own = dict(_own_groups(root, controller))
    for fields, kind in _mounts(root, controller):
        path = own.get(kind)
        if path is None:
            continue
        top = root / fields[4].lstrip("/")
        below = PurePosixPath(path)
        # A container sees a part of the tree. Its root need not be the group of this process.
        inside = below.is_relative_to(fields[3]) and ".." not in below.parts
        folder = top / below.relative_to(fields[3]) if inside else top
        for group in (folder, *folder.parents):
            yield group, kind
            if group == top:
                break


def _own_groups(root: Path, controller: str) -> Iterator[tuple[str, str]]:
    """(type of file system, path of the group) of the hierarchies that may have the controller."""
    for line in _lines(root / "proc" / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield "cgroup2", path
        elif controller in controllers.split(","):
            yield "cgroup", path


def _mounts(root: Path, controller: str) -> Iterator[tuple[list[str], str]]:
    """Their mounts: the fields of mountinfo (3: root, 4: mount point), and the type."""
    for line in _lines(root / "proc" / "self" / "mountinfo"):
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            yield before.split(" "), kind


def _memory(folder: Path, files: _Files) -> MemoryLimit | None:
    """The memory of one group; ``None`` if it has no limit."""
    texts = [text for name in files.limits for text in _lines(folder / name)]
    limit = min((int(text) for text in texts if text.isdigit()), default=_NO_LIMIT)
    if limit >= _NO_LIMIT:
        return None
    used = sum(map(int, _lines(folder / files.used)))
    stat = dict(line.split(" ") for line in _lines(folder / "memory.stat"))
    used -= sum(int(stat.get(name, 0)) for name in files.reclaimable)
    return MemoryLimit(limit, limit - min(max(used, 0), limit))


def _lines(path: Path) -> list[str]:
    """A file's lines; none if it does not exist, as on other systems, or cannot be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
