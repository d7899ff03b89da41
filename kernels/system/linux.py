"""Linux. Other POSIX systems run with this too, without what they do not have."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import resource
import signal
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk.kernels.system.control_groups import group_cpus, group_memory
from sdk.kernels.system.posix import Posix
from sdk.kernels.system.services import MemoryLimit

if TYPE_CHECKING:
    import socket

assert sys.platform != "win32" and sys.platform != "darwin"

#: Of <sys/mman.h> and <sys/prctl.h>, which Python does not name, or only from some release on:
#: MADV_POPULATE_WRITE is of Linux 5.14.
_POPULATE_WRITE, _NO_RESERVE, _DEATH_SIGNAL = 23, 0x4000, 1
#: Of <linux/fcntl.h>; a Python that was compiled where glibc is older than 2.27 lacks the names.
#: Without these seals (no further ones, no cut, no growth) a process could cut the file, and
#: reading it would end another one.
_ADD_SEALS, _GET_SEALS, _SEALS = 1033, 1034, 1 | 2 | 4
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
#: File systems that keep their files in memory.
_IN_MEMORY = ("tmpfs", "ramfs")


class Linux(Posix):
    """See :class:`Services`."""

    name = "Linux"
    can_fork = True
    can_seal = hasattr(os, "memfd_create")  # not in such a Python
    can_discard = True

    def available_ram(self) -> int:
        with contextlib.suppress(OSError), open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return self.installed_ram()

    def memory_limit(self) -> MemoryLimit | None:
        return group_memory()

    def peak_memory(self, process: int | None = None) -> int:
        if process is None:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        return int(status.partition("VmHWM:")[2].split()[0]) * 1024

    def trim_heap(self) -> None:
        """glibc keeps freed memory for the next allocation: 20 to 80 MiB after loading or closing a
        100 MB model. With other C libraries this does nothing."""
        trim = _malloc_trim()
        if trim is not None:
            trim(0)

    def map_private(self, nbytes: int, *, huge: bool = False, reserve: bool = True) -> mmap.mmap:
        # An anonymous mapping of Python's is shared by default, and shared ones never get huge
        # pages.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0 if reserve else _NO_RESERVE)
        mapping = mmap.mmap(-1, nbytes, flags=flags)
        if huge and hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        return mapping

    def populate(self, mapping: mmap.mmap, start: int, end: int) -> None:
        """64 MiB take 3 to 5 ms. Without this, two threads that packed 94 MiB into new pages took
        80 ms longer."""
        # Older systems do not support it, and it fails if memory is short: pages then come one by
        # one.
        with contextlib.suppress(OSError):
            mapping.madvise(_POPULATE_WRITE, start, end - start)

    def discard(self, mapping: mmap.mmap, start: int, nbytes: int) -> None:
        mapping.madvise(mmap.MADV_DONTNEED, start, nbytes)

    def forget_cached(self, file: int, start: int, nbytes: int) -> None:
        os.posix_fadvise(file, start, nbytes, os.POSIX_FADV_DONTNEED)

    def cpus(self) -> frozenset[int]:
        return frozenset(os.sched_getaffinity(0))

    def num_cpus(self) -> int:
        """At most as many as the control group's quota pays for. Threads of a step wait for each
        other: with more of them, all wait for the next period of the quota, up to 0.1 s."""
        count, quota = len(os.sched_getaffinity(0)), group_cpus()
        return count if quota is None else max(1, min(count, int(quota)))

    def core_kinds(self) -> tuple[int, ...]:
        """Hybrid x86 processors name their kinds; others say how fast each CPU can be."""
        named = [_listed(_text(f"/sys/devices/cpu_{kind}/cpus")) for kind in ("core", "atom")]
        if all(named):
            return tuple(map(len, named))
        speeds: dict[str, int] = {}
        for cpu in range(os.cpu_count() or 1):
            speed = _text(f"/sys/devices/system/cpu/cpu{cpu}/cpu_capacity")
            speeds[speed] = speeds.get(speed, 0) + 1
        return tuple(speeds[one] for one in sorted(speeds, key=lambda x: int(x or 0), reverse=True))

    def cpu_name(self) -> str:
        lines = _text("/proc/cpuinfo").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return names[0] if names else self.machine()

    def pin(self, process: int, cpus: frozenset[int]) -> None:
        os.sched_setaffinity(process, cpus)

    def lower_priority(self, by: int) -> None:
        """Threads have priorities of their own here."""
        niceness = min(os.getpriority(os.PRIO_PROCESS, 0) + by, 19)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)

    def reopen(self, file: int, *, direct: bool = False) -> int:
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        return os.open(f"/proc/self/fd/{file}", flags)

    def reserve_space(self, file: int, start: int, nbytes: int) -> None:
        os.posix_fallocate(file, start, nbytes)

    def sync_data(self, file: int) -> None:
        os.fdatasync(file)

    def is_in_memory(self, folder: str) -> bool:
        try:
            device = Path(folder).stat().st_dev
        except OSError:
            return False
        number = f"{os.major(device)}:{os.minor(device)}"
        # proc(5): type and source follow the dash
        fields = [line.split(" - ", 1) for line in _text("/proc/self/mountinfo").splitlines()]
        return any(
            left.split()[2] == number and right.split()[0] in _IN_MEMORY for left, right in fields
        )

    def memory_folder(self) -> str | None:
        return "/dev/shm"

    @contextlib.contextmanager
    def hidden_file(self, text: str) -> Iterator[str]:
        if not self.can_seal:
            with super().hidden_file(text) as name:
                yield name
            return
        with os.fdopen(os.memfd_create("embedlm-text"), "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            yield f"/proc/self/fd/{file.fileno()}"

    def sealed_memory(self, nbytes: int) -> int:
        file = os.memfd_create("embedlm-memory", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, nbytes)
            fcntl.fcntl(file, _ADD_SEALS, _SEALS)
        except BaseException:
            os.close(file)
            raise
        return file

    def is_sealed(self, file: int) -> bool:
        return fcntl.fcntl(file, _GET_SEALS) & _SEALS == _SEALS

    def take_lease(self, file: int) -> str:
        try:
            # Until the owner is cleared below, a break of the lease sends a signal: one that is
            # ignored by default.
            fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
            fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(file, fcntl.F_SETOWN, 0)
        except OSError as error:
            return f"the system gives no lease on the file: {error.strerror}"
        return ""

    def lease_is_wanted(self, file: int) -> bool:
        found: int = fcntl.fcntl(file, fcntl.F_GETLEASE)
        return found != fcntl.F_RDLCK

    def lease_seconds(self) -> float:
        text = _text("/proc/sys/fs/lease-break-time").strip()
        return float(text) if text.isdigit() else 0.0

    def check_peer(self, sock: socket.socket) -> None:
        import socket  # takes 3 ms, and only ranks are checked

        data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        user = _CREDENTIALS.unpack(data)[1]
        if user != os.getuid():
            raise PermissionError(f"the other side is user {user}; expected {os.getuid()}")

    def is_stopped(self, process: int) -> bool:
        return _text(f"/proc/{process}/stat").rpartition(")")[2].split()[:1] == ["T"]

    def end_with_parent(self) -> None:
        """The parent has only one thread, so the signal does not come early (see
        ``sdk/cluster/executors/worker.py``)."""
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


@functools.cache
def _malloc_trim() -> Any:
    """glibc's function; a library that is opened is part of a reference cycle."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def _text(path: str) -> str:
    """Of a file of the system; empty if there is none or it cannot be read."""
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _listed(text: str) -> set[int]:
    """The numbers in "0-3,8"."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found
