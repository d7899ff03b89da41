"""What Linux and macOS have in common."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import resource
import signal
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from sdk.kernels.system.services import MOST_STACK, UNKNOWN_STACK, Services, named

if TYPE_CHECKING:
    import asyncio  # loads ssl and sockets, which most starts do not need

assert sys.platform != "win32"


class Posix(Services):
    """See :class:`Services`."""

    can_pass_sockets = True

    def installed_ram(self) -> int:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def machine(self) -> str:
        return named(os.uname().machine)

    def release_pages(self, mapping: mmap.mmap, start: int, nbytes: int) -> None:
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_DONTNEED, start, nbytes)

    def stack_bytes(self) -> int:
        soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
        size = UNKNOWN_STACK if soft == resource.RLIM_INFINITY else soft
        if threading.current_thread() is not threading.main_thread():
            size = threading.stack_size() or size
        return min(size, MOST_STACK)

    def open_file(
        self, path: str | os.PathLike[str], flags: int, mode: int = 0o600, *, follow: bool = True
    ) -> int:
        return os.open(path, flags | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW), mode)

    def read_at(self, file: int, into: memoryview | mmap.mmap, offset: int) -> int:
        return os.preadv(file, [into], offset)

    def write_at(self, file: int, data: bytes | memoryview, offset: int) -> int:
        return os.pwrite(file, data, offset)

    def file_size_limit(self) -> int | None:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return None if limit == resource.RLIM_INFINITY else limit

    def sync_folder(self, folder: Path) -> None:
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)

    def lock_file(self, file: int, *, wait: bool = False) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    def make_private(self, file: int) -> None:
        os.fchmod(file, 0o600)

    def not_private(self, status: os.stat_result) -> str:
        user, mode = os.geteuid(), stat.S_IMODE(status.st_mode)
        if status.st_uid == user and not mode & 0o022:
            return ""
        expected = "700" if stat.S_ISDIR(status.st_mode) else "600"
        return f"expected owner {user} and mode {expected}, found {status.st_uid} and {mode:o}"

    def is_alive(self, process: int) -> bool:
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError):
            return True
        return True

    def leave_signals_to_parent(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    @contextlib.contextmanager
    def stop_signals(
        self, loop: asyncio.AbstractEventLoop, stop: Callable[[int], object]
    ) -> Iterator[None]:
        handled = (signal.SIGINT, signal.SIGTERM)
        for number in handled:
            loop.add_signal_handler(number, stop, number)
        try:
            yield
        finally:
            for number in handled:
                loop.remove_signal_handler(number)
