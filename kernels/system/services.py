"""The services of the operating system that embedlm uses beyond what Python has for all of them.

Linux, macOS and Windows have a class each; ``posix.py`` is what the first two share. Nothing else
in the library asks which system this is, reads /proc or imports a module of one system:
tests/structure/test_system.py. A service that a system lacks does nothing there if that only costs
time or memory; otherwise it says why it cannot, or raises :class:`OSError`.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import socket

#: A stack that is counted on at most, and that of a thread where the system names no limit.
MOST_STACK, UNKNOWN_STACK = 8 * 2**20, 2 * 2**20


class MemoryLimit(NamedTuple):
    """The tightest limit on the memory of this process and the least that one leaves, in bytes."""

    limit: int
    available: int


def named(architecture: str) -> str:
    """What Linux calls an architecture."""
    return {"AMD64": "x86_64", "arm64": "aarch64", "ARM64": "aarch64"}.get(
        architecture, architecture
    )


class Services(ABC):
    """One operating system. Stateless: every method may be called from any thread."""

    #: As in messages: "Linux", "macOS", "Windows".
    name: str
    #: Whether processes of ours can be started with sockets that they inherit, as ranks are, and
    #: be forked from one another, as replicas are.
    can_pass_sockets: bool = False
    can_fork: bool = False
    #: Whether there is :meth:`sealed_memory`.
    can_seal: bool = False
    #: Whether :meth:`discard` returns memory.
    can_discard: bool = False

    # ---- memory ---------------------------------------------------------------------------------

    @abstractmethod
    def installed_ram(self) -> int:
        """Bytes of RAM of this machine."""

    @abstractmethod
    def available_ram(self) -> int:
        """Bytes that processes can still get without swapping: the system's own estimate."""

    def memory_limit(self) -> MemoryLimit | None:
        """That of the container or job this process is in; ``None``: there is none."""
        return None

    @abstractmethod
    def peak_memory(self, process: int | None = None) -> int:
        """The largest resident memory of a process (default: this one) so far, in bytes.

        :raises OSError: it has ended, or the system tells this of the own process alone.
        """

    def trim_heap(self) -> None:
        """Return the C allocator's free pages to the system, if it keeps any."""

    @abstractmethod
    def map_private(self, nbytes: int, *, huge: bool = False, reserve: bool = True) -> mmap.mmap:
        """Zeros that no other process sees; pages that are never written take no memory.

        ``huge``: on huge pages where the system gives them to everybody. ``reserve=False``: address
        space for more than there is memory for, where the system tells one from the other.

        :raises OSError: there is not enough memory or address space.
        """

    def populate(self, mapping: mmap.mmap, start: int, end: int) -> None:
        """Have the system allocate these bytes of a private mapping now, where one call can."""

    def discard(self, mapping: mmap.mmap, start: int, nbytes: int) -> None:
        """Return whole pages of a private mapping: they are zeros until they are written. Does
        nothing unless ``can_discard``."""

    def release_pages(self, mapping: mmap.mmap, start: int, nbytes: int) -> None:
        """Give up pages of a mapped file; the next access reads them again. Advice."""

    def forget_cached(self, file: int, start: int, nbytes: int) -> None:
        """Have the system write a part of a file and drop it from its cache. Advice."""

    # ---- processors and threads -----------------------------------------------------------------

    @abstractmethod
    def cpus(self) -> frozenset[int]:
        """The numbers of the logical CPUs that this process may run on."""

    def num_cpus(self) -> int:
        """How many threads should compute at once: one for each of :meth:`cpus`; on macOS only the
        fast ones count, on Linux no more than a quota of CPU time pays for."""
        return len(self.cpus())

    def core_kinds(self) -> tuple[int, ...]:
        """How many logical CPUs of each kind the machine has, fastest kind first; one number if
        all are alike or the system does not say."""
        return (os.cpu_count() or 1,)

    @abstractmethod
    def machine(self) -> str:
        """The architecture that this process runs on, as Linux names it: ``"x86_64"``,
        ``"aarch64"``."""

    @abstractmethod
    def cpu_name(self) -> str:
        """The processor's name; the architecture if the system does not say."""

    def pin(self, process: int, cpus: frozenset[int]) -> None:
        """Let a process run on these CPUs alone. :raises OSError: the system cannot."""
        raise OSError(f"{self.name} cannot bind a process to CPUs")

    def lower_priority(self, by: int) -> None:
        """Let this thread take less of the CPUs than others; ``by``: 1 to 19, steps of nice(2)."""

    def stack_bytes(self) -> int:
        """Bytes of stack that this thread can be counted on to have."""
        return min(threading.stack_size() or UNKNOWN_STACK, MOST_STACK)

    # ---- files ----------------------------------------------------------------------------------

    @abstractmethod
    def open_file(
        self, path: str | os.PathLike[str], flags: int, mode: int = 0o600, *, follow: bool = True
    ) -> int:
        """As :func:`os.open`, for bytes; the file can be removed while it is open, and a pipe
        without another end is not waited for.

        ``follow=False``: a symbolic link is an error where the system knows them.
        """

    @abstractmethod
    def reopen(self, file: int, *, direct: bool = False) -> int:
        """The same file open for reading once more. ``direct``: past the system's page cache;
        offsets, sizes and addresses must then be multiples of 4096.

        :raises OSError: the file system cannot.
        """

    @abstractmethod
    def read_at(self, file: int, into: memoryview | mmap.mmap, offset: int) -> int:
        """Read into memory without moving the file's position: bytes that were read, fewer than
        asked for at most at the end. :raises OSError: it cannot be read."""

    @abstractmethod
    def write_at(self, file: int, data: bytes | memoryview, offset: int) -> int:
        """Write without moving the file's position: bytes that were written."""

    def file_size_limit(self) -> int | None:
        """The largest file that this process may write: a signal ends some that try; ``None``:
        there is no such limit."""
        return None

    @abstractmethod
    def reserve_space(self, file: int, start: int, nbytes: int) -> None:
        """Extend a file to ``start + nbytes`` bytes that the disk has room for.

        :raises OSError: the disk is full.
        """

    def sync_data(self, file: int) -> None:
        """Wait until a file's bytes are on the disk."""
        os.fsync(file)

    def sync_folder(self, folder: Path) -> None:
        """Wait until new names in a folder are on the disk, where that is a step of its own."""

    def replace_file(self, source: Path, target: Path) -> None:
        """Rename over ``target``: readers see the old file or the new one. On Windows nobody may
        have ``target`` open."""
        source.replace(target)

    @abstractmethod
    def lock_file(self, file: int, *, wait: bool = False) -> bool:
        """Take an exclusive lock, which ends with the process or when ``file`` is closed; whether
        it was taken. ``wait``: until another process gives it back."""

    def make_private(self, file: int) -> None:
        """Let nobody but this user read or write a file that this user owns."""

    def not_private(self, status: os.stat_result) -> str:
        """Why others may write a file or folder; empty: they may not."""
        return ""

    def is_in_memory(self, folder: str) -> bool:
        """Whether files in ``folder`` are kept in memory, as far as the system says."""
        return False

    def memory_folder(self) -> str | None:
        """A folder whose files are in memory, for those who share it; ``None``: there is none."""
        return None

    @contextmanager
    def hidden_file(self, text: str) -> Iterator[str]:
        """The name of a file with this text, which only this user can read, until the end."""
        file = tempfile.NamedTemporaryFile("w", encoding="utf-8", delete=False)  # noqa: SIM115
        try:
            with file:
                file.write(text)
            yield file.name
        finally:
            Path(file.name).unlink()

    def sealed_memory(self, nbytes: int) -> int:
        """A file in memory without a name, which nobody can cut while others have it mapped.

        :raises OSError: there is not enough memory, or the system has none (``can_seal``).
        """
        raise OSError(f"{self.name} has no sealed files in memory")

    def is_sealed(self, file: int) -> bool:
        """Whether it is one. :raises OSError: it is not a file in memory."""
        raise OSError(f"{self.name} has no sealed files in memory")

    def take_lease(self, file: int) -> str:
        """Have others wait who open this file for writing (a read lease of fcntl(2)); empty if it
        was taken, else why not."""
        return f"{self.name} has no leases on files"

    def lease_is_wanted(self, file: int) -> bool:
        """Whether another process waits until the lease is given back."""
        raise OSError(f"{self.name} has no leases on files")

    def lease_seconds(self) -> float:
        """How long the system lets it wait; 0 where it does not say."""
        return 0.0

    # ---- processes ------------------------------------------------------------------------------

    def check_peer(self, sock: socket.socket) -> None:
        """:raises PermissionError: another user is at the other end of a Unix socket.
        :raises OSError: the system does not say who is."""
        raise OSError(f"{self.name} does not say who is at the other end")

    @abstractmethod
    def is_alive(self, process: int) -> bool:
        """Whether a process of this machine runs, also of another user. What cannot be a process's
        number counts as one: nothing is known of it."""

    def is_stopped(self, process: int) -> bool:
        """Whether a signal has stopped a process; False where the system does not say."""
        return False

    def end_with_parent(self) -> None:
        """Have the system end this process when its parent ends, where it can."""

    @abstractmethod
    def leave_signals_to_parent(self) -> None:
        """For a process of ours: Ctrl-C reaches the whole group, and the parent decides."""

    @abstractmethod
    def stop_signals(
        self, loop: Any, stop: Callable[[int], object]
    ) -> AbstractContextManager[None]:
        """Inside, Ctrl-C and a request to end call ``stop(number)`` in ``loop``, an asyncio loop
        of the main thread, instead of ending the process."""

    def use_utf8(self, *streams: Any) -> None:
        """Let these streams of a command write every character, where a console has a code page."""
