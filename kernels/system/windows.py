"""Windows. Large pages need a privilege that programs do not have, and mapped memory counts as used
from the start, so caches have no more places than there is memory for."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import msvcrt
import os
import signal
import sys
import time
import winreg
from collections.abc import Callable, Iterator
from ctypes import byref, sizeof, wintypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk.kernels.system.services import MOST_STACK, MemoryLimit, Services, named as _named

if TYPE_CHECKING:
    import asyncio  # loads ssl and sockets, which most starts do not need

assert sys.platform == "win32"

#: Of <winnt.h>, <winbase.h> and <winerror.h>.
_GENERIC_READ, _GENERIC_WRITE, _APPEND = 0x80000000, 0x40000000, 0x0004
_SHARE_ALL, _NORMAL, _NO_BUFFERING = 0x7, 0x80, 0x20000000
_CREATE_NEW, _CREATE_ALWAYS, _OPEN_EXISTING, _OPEN_ALWAYS, _TRUNCATE = 1, 2, 3, 4, 5
_LOCK_EXCLUSIVE, _LOCK_AT_ONCE, _LOCK_VIOLATION, _END_OF_FILE = 0x2, 0x1, 33, 38
_EXTENDED_LIMITS, _MEMORY_USE, _PROCESS_LIMIT, _JOB_LIMIT = 9, 28, 0x100, 0x200
_QUERY, _SYNCHRONIZE, _WAITING, _DENIED = 0x1000, 0x100000, 0x102, 5
_BELOW_NORMAL, _LOWEST, _UTF8, _ALL_GROUPS, _CORES = -1, -2, 65001, 0xFFFF, 0
#: A byte that no file has: locks keep others from reading what they cover.
_LOCKED_BYTE = 1 << 62
#: How long a file that another process has open is tried again, in seconds.
_PATIENCE_S = 2.0


class _MemoryStatus(ctypes.Structure):
    _fields_ = [  # MEMORYSTATUSEX
        ("length", wintypes.DWORD),
        ("load", wintypes.DWORD),
        *((name, ctypes.c_uint64) for name in ("total", "available", "total_page_file")),
        *((name, ctypes.c_uint64) for name in ("available_page_file", "total_virtual")),
        *((name, ctypes.c_uint64) for name in ("available_virtual", "extended")),
    ]


class _MemoryCounters(ctypes.Structure):
    _fields_ = [  # PROCESS_MEMORY_COUNTERS
        ("size", wintypes.DWORD),
        ("faults", wintypes.DWORD),
        *((name, ctypes.c_size_t) for name in ("peak", "resident", "peak_paged", "paged")),
        *((name, ctypes.c_size_t) for name in ("peak_unpaged", "unpaged", "committed")),
        ("peak_committed", ctypes.c_size_t),
    ]


class _JobLimits(ctypes.Structure):
    _fields_ = [  # JOBOBJECT_EXTENDED_LIMIT_INFORMATION
        *((name, ctypes.c_int64) for name in ("process_time", "job_time")),
        ("flags", wintypes.DWORD),
        *((name, ctypes.c_size_t) for name in ("least_set", "most_set")),
        ("processes", wintypes.DWORD),
        ("affinity", ctypes.c_size_t),
        *((name, wintypes.DWORD) for name in ("priority", "scheduling")),
        ("io", ctypes.c_uint64 * 6),
        *((name, ctypes.c_size_t) for name in ("process_memory", "job_memory")),
        *((name, ctypes.c_size_t) for name in ("peak_process", "peak_job")),
    ]


class _Overlapped(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("status", "count")),
        *((name, wintypes.DWORD) for name in ("low", "high")),
        ("event", wintypes.HANDLE),
    ]


class Windows(Services):
    """See :class:`Services`."""

    name = "Windows"

    # ---- memory ---------------------------------------------------------------------------------

    def installed_ram(self) -> int:
        return int(_memory_status().total)

    def available_ram(self) -> int:
        found = _memory_status()
        return int(min(found.available, found.available_page_file))

    def memory_limit(self) -> MemoryLimit | None:
        """That of the job object; a container is one."""
        limits = _JobLimits()
        query = _kernel().QueryInformationJobObject
        if not query(None, _EXTENDED_LIMITS, byref(limits), sizeof(limits), None):
            return None
        found = []
        if limits.flags & _PROCESS_LIMIT:
            found.append((limits.process_memory, _counters().committed))
        if limits.flags & _JOB_LIMIT:
            use = (ctypes.c_uint64 * 2)()  # JobMemory, PeakJobMemoryUsed
            known = query(None, _MEMORY_USE, byref(use), sizeof(use), None)
            found.append((limits.job_memory, use[0] if known else _counters().committed))
        if not found:
            return None
        left = min(limit - min(used, limit) for limit, used in found)
        return MemoryLimit(min(limit for limit, _ in found), left)

    def peak_memory(self, process: int | None = None) -> int:
        if process is None:
            return int(_counters().peak)
        handle = _opened(process, _QUERY)
        if not handle:
            raise ctypes.WinError(ctypes.get_last_error())
        try:
            return int(_counters(handle).peak)
        finally:
            _kernel().CloseHandle(handle)

    def map_private(self, nbytes: int, *, huge: bool = False, reserve: bool = True) -> mmap.mmap:
        return mmap.mmap(-1, nbytes)

    def release_pages(self, mapping: mmap.mmap, start: int, nbytes: int) -> None:
        """Unlocking pages that are not locked takes them out of the working set."""
        at = ctypes.addressof(ctypes.c_char.from_buffer(mapping)) + start
        _kernel().VirtualUnlock(ctypes.c_void_p(at), ctypes.c_size_t(nbytes))

    # ---- processors and threads -----------------------------------------------------------------

    def cpus(self) -> frozenset[int]:
        """Those of the affinity mask; on a machine with several groups of 64, all."""
        kernel, own, every = _kernel(), ctypes.c_size_t(), ctypes.c_size_t()
        if kernel.GetActiveProcessorGroupCount() > 1:
            return frozenset(range(kernel.GetActiveProcessorCount(_ALL_GROUPS)))
        process = kernel.GetCurrentProcess()
        if not kernel.GetProcessAffinityMask(process, byref(own), byref(every)) or not own.value:
            return frozenset(range(os.cpu_count() or 1))
        return frozenset(bit for bit in range(64) if own.value >> bit & 1)

    def core_kinds(self) -> tuple[int, ...]:
        size = wintypes.DWORD(0)
        query = _kernel().GetLogicalProcessorInformationEx
        query(_CORES, None, byref(size))
        data = ctypes.create_string_buffer(max(size.value, 1))
        if not query(_CORES, data, byref(size)):
            return super().core_kinds()
        kinds: dict[int, int] = {}
        at, text = 0, data.raw[: size.value]
        while at < len(text):  # SYSTEM_LOGICAL_PROCESSOR_INFORMATION_EX
            length = int.from_bytes(text[at + 4 : at + 8], "little")
            groups = int.from_bytes(text[at + 30 : at + 32], "little")
            masks = [text[at + 32 + 16 * i : at + 40 + 16 * i] for i in range(groups)]
            count = sum(int.from_bytes(mask, "little").bit_count() for mask in masks)
            kinds[text[at + 9]] = kinds.get(text[at + 9], 0) + count
            at += length
        return tuple(kinds[kind] for kind in sorted(kinds, reverse=True))

    def cpu_name(self) -> str:
        place = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"
        with contextlib.suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, place) as key:
            return str(winreg.QueryValueEx(key, "ProcessorNameString")[0]).strip()
        return self.machine()

    def machine(self) -> str:
        """Python's ``platform`` would ask a service of the system, which takes a while."""
        return _named(os.environ.get("PROCESSOR_ARCHITECTURE", ""))

    def pin(self, process: int, cpus: frozenset[int]) -> None:
        handle = _opened(process, 0x0200)  # PROCESS_SET_INFORMATION
        mask = ctypes.c_size_t(sum(1 << cpu for cpu in cpus))
        done = handle and _kernel().SetProcessAffinityMask(handle, mask)
        error = ctypes.get_last_error()
        if handle:
            _kernel().CloseHandle(handle)
        if not done:
            raise ctypes.WinError(error)

    def lower_priority(self, by: int) -> None:
        kernel = _kernel()
        kernel.SetThreadPriority(kernel.GetCurrentThread(), _LOWEST if by >= 19 else _BELOW_NORMAL)

    def stack_bytes(self) -> int:
        """Those of this thread, whoever made it."""
        low, high = ctypes.c_size_t(), ctypes.c_size_t()
        _kernel().GetCurrentThreadStackLimits(byref(low), byref(high))
        return min(high.value - low.value, MOST_STACK)

    # ---- files ----------------------------------------------------------------------------------

    def open_file(
        self, path: str | os.PathLike[str], flags: int, mode: int = 0o600, *, follow: bool = True
    ) -> int:
        """Python's own function would not let others remove the file."""
        reads, writes = not flags & os.O_WRONLY, flags & (os.O_WRONLY | os.O_RDWR)
        access = _GENERIC_READ if reads else 0
        if writes:
            access |= _APPEND if flags & os.O_APPEND and not reads else _GENERIC_WRITE
        made = {
            0: _OPEN_EXISTING,
            os.O_CREAT: _OPEN_ALWAYS,
            os.O_CREAT | os.O_TRUNC: _CREATE_ALWAYS,
            os.O_TRUNC: _TRUNCATE,
        }.get(flags & (os.O_CREAT | os.O_TRUNC | os.O_EXCL), _CREATE_NEW)
        handle = _kernel().CreateFileW(
            os.fspath(path), access, _SHARE_ALL, None, made, _NORMAL, None
        )
        if handle == wintypes.HANDLE(-1).value:
            raise _error(path)
        return _descriptor(handle, flags)

    def reopen(self, file: int, *, direct: bool = False) -> int:
        flags = _NO_BUFFERING if direct else 0
        own = msvcrt.get_osfhandle(file)
        handle = _kernel().ReOpenFile(own, _GENERIC_READ, _SHARE_ALL, flags)
        if handle == wintypes.HANDLE(-1).value:
            raise ctypes.WinError(ctypes.get_last_error())
        return _descriptor(handle, os.O_RDONLY)

    def read_at(self, file: int, into: memoryview | mmap.mmap, offset: int) -> int:
        """With the place given, a handle's own position does not count, though it moves."""
        view = memoryview(into)
        memory = (ctypes.c_char * view.nbytes).from_buffer(view.cast("B"))
        count, at = wintypes.DWORD(), _at(offset)
        size = min(view.nbytes, 1 << 30)
        handle = msvcrt.get_osfhandle(file)
        if not _kernel().ReadFile(handle, memory, size, byref(count), byref(at)):
            error = ctypes.get_last_error()
            if error == _END_OF_FILE:
                return 0
            raise ctypes.WinError(error)
        return count.value

    def write_at(self, file: int, data: bytes | memoryview, offset: int) -> int:
        view = memoryview(data).cast("B")
        size = min(view.nbytes, 1 << 30)
        if view.readonly:
            memory: Any = bytes(view[:size])
        else:
            memory = (ctypes.c_char * size).from_buffer(view)
        count, at = wintypes.DWORD(), _at(offset)
        handle = msvcrt.get_osfhandle(file)
        if not _kernel().WriteFile(handle, memory, size, byref(count), byref(at)):
            raise ctypes.WinError(ctypes.get_last_error())
        return count.value

    def reserve_space(self, file: int, start: int, nbytes: int) -> None:
        if os.fstat(file).st_size < start + nbytes:
            os.ftruncate(file, start + nbytes)

    def replace_file(self, source: Path, target: Path) -> None:
        """Whoever has the target open keeps it from being replaced: it is tried again for a
        while."""
        ends = time.monotonic() + _PATIENCE_S
        while True:
            try:
                source.replace(target)
                return
            except PermissionError:
                if time.monotonic() > ends:
                    raise
                time.sleep(0.01)

    def lock_file(self, file: int, *, wait: bool = False) -> bool:
        flags, at = _LOCK_EXCLUSIVE | (0 if wait else _LOCK_AT_ONCE), _at(_LOCKED_BYTE)
        if _kernel().LockFileEx(msvcrt.get_osfhandle(file), flags, 0, 1, 0, byref(at)):
            return True
        error = ctypes.get_last_error()
        if error == _LOCK_VIOLATION:
            return False
        raise ctypes.WinError(error)

    # ---- processes ------------------------------------------------------------------------------

    def is_alive(self, process: int) -> bool:
        """``os.kill(process, 0)`` would send Ctrl-C here."""
        if process >> 32:
            return True
        handle = _opened(process, _SYNCHRONIZE)
        if not handle:
            return ctypes.get_last_error() == _DENIED
        try:
            return bool(_kernel().WaitForSingleObject(handle, 0) == _WAITING)
        finally:
            _kernel().CloseHandle(handle)

    def leave_signals_to_parent(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    @contextlib.contextmanager
    def stop_signals(
        self, loop: asyncio.AbstractEventLoop, stop: Callable[[int], object]
    ) -> Iterator[None]:
        """Ctrl-C and Ctrl-Break. Loops take no handlers here, and see a signal when they wake."""
        handled = (signal.SIGINT, signal.SIGBREAK)

        def handle(number: int, frame: object) -> None:
            loop.call_soon_threadsafe(stop, number)

        before = [signal.signal(number, handle) for number in handled]
        try:
            yield
        finally:
            for number, old in zip(handled, before, strict=True):
                signal.signal(number, old)

    def use_utf8(self, *streams: Any) -> None:
        for stream in streams:
            with contextlib.suppress(AttributeError, ValueError, OSError):
                stream.reconfigure(encoding="utf-8", errors="replace")


def _descriptor(handle: int, flags: int) -> int:
    kept = flags & (os.O_APPEND | os.O_WRONLY | os.O_RDWR)
    return msvcrt.open_osfhandle(handle, kept | os.O_NOINHERIT | os.O_BINARY)


def _error(path: str | os.PathLike[str]) -> OSError:
    found = ctypes.WinError(ctypes.get_last_error())
    return OSError(found.errno, found.strerror, os.fspath(path), found.winerror)


def _at(offset: int) -> _Overlapped:
    return _Overlapped(0, 0, offset & 0xFFFFFFFF, offset >> 32, None)


def _opened(process: int, access: int) -> int:
    """A handle of a process, or 0."""
    return int(_kernel().OpenProcess(access, False, process) or 0)


def _memory_status() -> _MemoryStatus:
    found = _MemoryStatus()
    found.length = sizeof(found)
    if not _kernel().GlobalMemoryStatusEx(byref(found)):
        raise ctypes.WinError(ctypes.get_last_error())
    return found


def _counters(process: int | None = None) -> _MemoryCounters:
    found = _MemoryCounters()
    kernel = _kernel()
    handle = kernel.GetCurrentProcess() if process is None else process
    if not kernel.K32GetProcessMemoryInfo(handle, byref(found), sizeof(found)):
        raise ctypes.WinError(ctypes.get_last_error())
    return found


@functools.cache
def _kernel() -> Any:
    """kernel32 with the types of those functions that take or return more than an int."""
    library = ctypes.WinDLL("kernel32", use_last_error=True)
    handle, number, pointer = wintypes.HANDLE, wintypes.DWORD, ctypes.c_void_p
    for name, result, arguments in (
        ("GetCurrentProcess", handle, ()),
        ("GetCurrentThread", handle, ()),
        ("OpenProcess", handle, (number, wintypes.BOOL, number)),
        ("CloseHandle", wintypes.BOOL, (handle,)),
        ("WaitForSingleObject", number, (handle, number)),
        ("K32GetProcessMemoryInfo", wintypes.BOOL, (handle, pointer, number)),
        ("GlobalMemoryStatusEx", wintypes.BOOL, (pointer,)),
        (
            "QueryInformationJobObject",
            wintypes.BOOL,
            (handle, ctypes.c_int, pointer, number, pointer),
        ),
        ("GetProcessAffinityMask", wintypes.BOOL, (handle, pointer, pointer)),
        ("SetProcessAffinityMask", wintypes.BOOL, (handle, ctypes.c_size_t)),
        ("GetActiveProcessorGroupCount", wintypes.WORD, ()),
        ("GetActiveProcessorCount", number, (wintypes.WORD,)),
        ("GetLogicalProcessorInformationEx", wintypes.BOOL, (ctypes.c_int, pointer, pointer)),
        ("SetThreadPriority", wintypes.BOOL, (handle, ctypes.c_int)),
        ("GetCurrentThreadStackLimits", None, (pointer, pointer)),
        ("VirtualUnlock", wintypes.BOOL, (pointer, ctypes.c_size_t)),
        (
            "CreateFileW",
            handle,
            (wintypes.LPCWSTR, number, number, pointer, number, number, handle),
        ),
        ("ReOpenFile", handle, (handle, number, number, number)),
        ("ReadFile", wintypes.BOOL, (handle, pointer, number, pointer, pointer)),
        ("WriteFile", wintypes.BOOL, (handle, pointer, number, pointer, pointer)),
        ("LockFileEx", wintypes.BOOL, (handle, number, number, number, number, pointer)),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
