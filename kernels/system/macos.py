"""macOS."""

from __future__ import annotations

import ctypes
import fcntl
import functools
import mmap
import os
import resource
import sys
from typing import Any

from sdk.kernels.system.posix import Posix

assert sys.platform == "darwin"

#: Of <fcntl.h>, <sys/mman.h>, <mach/host_info.h> and <sys/qos.h>.
_F_GETPATH, _F_NOCACHE, _F_FULLFSYNC, _F_PREALLOCATE = 50, 48, 51, 42
_F_ALLOCATEALL, _F_PEOFPOSMODE = 4, 3
_MAP_FIXED = 0x10
_HOST_VM_INFO64, _VM_INFO64_WORDS = 4, 40
_QOS_UTILITY, _QOS_BACKGROUND = 0x11, 0x09


class _Preallocate(ctypes.Structure):
    _fields_ = [  # fstore_t
        ("flags", ctypes.c_uint32),
        ("mode", ctypes.c_int),
        ("offset", ctypes.c_int64),
        ("length", ctypes.c_int64),
        ("allocated", ctypes.c_int64),
    ]


class _VmStatistics(ctypes.Structure):
    """The beginning of ``vm_statistics64_data_t``: numbers of pages."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("free", "active", "inactive", "wired")),
        *(
            (name, ctypes.c_uint64)
            for name in ("zero_filled", "reactivations", "pageins", "pageouts", "faults")
        ),
        *((name, ctypes.c_uint64) for name in ("cow_faults", "lookups", "hits", "purges")),
        *((name, ctypes.c_uint32) for name in ("purgeable", "speculative")),
        ("rest", ctypes.c_uint32 * (_VM_INFO64_WORDS - 24)),
    ]


class MacOS(Posix):
    """See :class:`Services`. There are no huge pages and no limits on memory, and a thread runs on
    fast cores or slow ones by its quality of service."""

    name = "macOS"
    can_discard = True

    def available_ram(self) -> int:
        """Free pages, and those that are dropped before anything is compressed."""
        found, count = _VmStatistics(), ctypes.c_uint32(_VM_INFO64_WORDS)
        libc = _libc()
        host = libc.mach_host_self()
        if libc.host_statistics64(host, _HOST_VM_INFO64, ctypes.byref(found), ctypes.byref(count)):
            return self.installed_ram()
        # Speculative pages count as free there; inactive ones have files, or are compressed.
        pages = found.free + found.inactive + found.purgeable
        return min(int(pages) * mmap.PAGESIZE, self.installed_ram())

    def installed_ram(self) -> int:
        return _sysctl("hw.memsize", ctypes.c_uint64()) or super().installed_ram()

    def peak_memory(self, process: int | None = None) -> int:
        if process is not None and process != os.getpid():
            raise OSError("macOS tells the peak of the own process alone")
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes here

    def trim_heap(self) -> None:
        _libc().malloc_zone_pressure_relief(None, ctypes.c_size_t(0))

    def map_private(self, nbytes: int, *, huge: bool = False, reserve: bool = True) -> mmap.mmap:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON)

    def discard(self, mapping: mmap.mmap, start: int, nbytes: int) -> None:
        """New pages in the place of the old ones: MADV_DONTNEED keeps their contents here."""
        at = ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + start
        prot, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANON
        found = _libc().mmap(at, nbytes, prot, flags | _MAP_FIXED, -1, 0)
        if found != at:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def cpus(self) -> frozenset[int]:
        return frozenset(range(os.cpu_count() or 1))

    def num_cpus(self) -> int:
        """The fast cores: threads that share work evenly would wait for one on a slow core."""
        return self.core_kinds()[0]

    def core_kinds(self) -> tuple[int, ...]:
        levels = _sysctl("hw.nperflevels", ctypes.c_uint32())
        found = [
            _sysctl(f"hw.perflevel{level}.logicalcpu", ctypes.c_uint32()) for level in range(levels)
        ]
        return tuple(filter(None, found)) or (os.cpu_count() or 1,)

    def cpu_name(self) -> str:
        text = ctypes.create_string_buffer(256)
        _sysctl("machdep.cpu.brand_string", text)
        return text.value.decode("utf-8", "replace") or self.machine()

    def lower_priority(self, by: int) -> None:
        """A class of service: a thread of the lowest one runs on slow cores alone."""
        _libc().pthread_set_qos_class_self_np(_QOS_BACKGROUND if by >= 19 else _QOS_UTILITY, 0)

    def reopen(self, file: int, *, direct: bool = False) -> int:
        name = fcntl.fcntl(file, _F_GETPATH, bytes(1024)).rstrip(b"\0")
        again = os.open(name, os.O_RDONLY)
        if not os.path.samestat(os.fstat(again), os.fstat(file)):
            os.close(again)
            raise OSError(f"{os.fsdecode(name)} is another file by now")
        if direct:
            fcntl.fcntl(again, _F_NOCACHE, 1)
        return again

    def reserve_space(self, file: int, start: int, nbytes: int) -> None:
        more = start + nbytes - os.fstat(file).st_blocks * 512
        if more > 0:
            request = _Preallocate(_F_ALLOCATEALL, _F_PEOFPOSMODE, 0, more, 0)
            fcntl.fcntl(file, _F_PREALLOCATE, bytes(request))
        if os.fstat(file).st_size < start + nbytes:
            os.ftruncate(file, start + nbytes)

    def sync_data(self, file: int) -> None:
        """fsync() leaves them in the disk's own cache here."""
        fcntl.fcntl(file, _F_FULLFSYNC)


@functools.cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_int64,
    )
    return library


def _sysctl(name: str, into: Any) -> int:
    """A number of the system, or 0 if it has no such name; a text is left in ``into``."""
    size = ctypes.c_size_t(ctypes.sizeof(into))
    if _libc().sysctlbyname(name.encode(), ctypes.byref(into), ctypes.byref(size), None, 0):
        return 0
    return into.value if isinstance(into.value, int) else 0
