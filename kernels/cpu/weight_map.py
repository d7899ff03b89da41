"""A file of the cache of weights in this process: mapped and shared, or as a private copy.

Who can change the file could end this process: an access to a mapped page that is behind the end of
a file raises SIGBUS. So the file is mapped only under a read lease (``fcntl(2)``, F_SETLEASE): a
process that opens the file for writing or truncates it then waits, up to 45 s
(/proc/sys/fs/lease-break-time), until the lease is given back. A thread asks for that every few
seconds, copies the weights over the mapping, in place, and gives the lease back. No signal is used.
Where the system gives no lease (another file system, somebody writes already), the weights are
copied into private memory at once.

The lease does not protect from a disk that fails to read, nor from a process that is stopped for
longer than those 45 s. Removing or replacing the file is harmless: the mapping keeps its bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from ctypes import byref

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.cpu.library import WeightCheck
from sdk.kernels.errors import KernelError
from sdk.kernels.system import SYSTEM

#: Bytes that have a sum.
PIECE = 1 << 20
#: Bytes that are copied at a time.
_CHUNK = 64 << 20
#: Seconds between two looks at the lease, at most.
_LOOK = 5.0
_WRONG = 2  # CheckState of native/abi.hpp
logger = logging.getLogger("sdk")


class Lease:
    """A read lease on an open file, which is closed with it."""

    def __init__(self, file: int) -> None:
        self.file = file
        #: Why there is none; empty: the lease is held.
        self.refused = SYSTEM.take_lease(file)

    @property
    def is_wanted(self) -> bool:
        """Whether another process waits until it is given back."""
        return SYSTEM.lease_is_wanted(self.file)

    def close(self) -> None:
        """Idempotent. A forked child has the same lease, held until both have closed it."""
        file, self.file = self.file, -1
        if file >= 0:
            os.close(file)


class _Memory:
    """Bytes at an address for numpy: arrays of it keep ``owner``. The type says that they may be
    written, which torch asks for; the pages say that they may not."""

    def __init__(self, address: int, nbytes: int, owner: object) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }
        self.owner = owner


class WeightMap:
    """The first ``size`` bytes of an open file. Freed with its last array; nothing else to close.

    ``file`` is open for reading, and is closed with the map. ``threads``: of a copy. ``used``: the
    parts that are copied, where that is not all; the others are zeros in a copy.

    :raises KernelError: no address space or memory, or the file became shorter.
    """

    def __init__(
        self,
        file: int,
        size: int,
        threads: int,
        library: ctypes.CDLL,
        used: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.size = size
        self._used = [(0, size)] if used is None else _pages(used, size)
        self._library = library
        self._checks: list[WeightCheck] = []
        self._later: list[WeightCheck] = []
        self._sums: list[NDArray[np.uint64]] = []
        self._on_damage: Callable[[], None] = _nothing
        self._stop, self._lease = threading.Event(), Lease(file)
        weakref.finalize(self, _end, self._stop, self._lease).atexit = False
        #: Why the weights are a private copy; empty: they are mapped, and all processes share them.
        self.copied = self._lease.refused
        try:
            # Another description of the file, which has no lease: the mapping keeps it open.
            again = SYSTEM.reopen(file)
            try:
                if os.fstat(again).st_size < size:
                    raise KernelError("packed weights: the file in the cache became shorter")
                if self.copied:
                    self._mapping = SYSTEM.map_private(size)
                else:
                    self._mapping = mmap.mmap(again, size, access=mmap.ACCESS_READ)
            finally:
                os.close(again)
        except OSError as error:
            raise KernelError(f"packed weights: cannot map {size} bytes: {error}") from error
        self._base = int(np.frombuffer(self._mapping, np.uint8).ctypes.data)
        if self.copied:
            self._copy(threads)

    def bytes_at(self, start: int, nbytes: int) -> NDArray[np.uint8]:
        """A part of the file; the caller has checked that it lies inside."""
        assert 0 <= start <= start + nbytes <= self.size
        return np.asarray(_Memory(self._base + start, nbytes, self))

    @property
    def base(self) -> int:
        """Where the file begins in memory."""
        return self._base

    def check(
        self, start: int, nbytes: int, sums: NDArray[np.uint64], *, ahead: bool = True
    ) -> WeightCheck:
        """The check of a weight's bytes; ``sums``: of its pieces. ``ahead``: they are read before
        they are needed."""
        end = self._base + self.size if ahead else self._base + start + nbytes
        found = WeightCheck(self._base + start, nbytes, PIECE, sums.ctypes.data, end, 0, 0, 0)
        (self._checks if ahead else self._later).append(found)
        self._sums.append(sums)
        return found

    def read_ahead(self, on_damage: Callable[[], None]) -> None:
        """Compare all weights in the order of the file, in a thread that looks after the lease
        afterwards. Products that come first compare their weights themselves.

        ``on_damage``: called if a weight is not what was written.
        """
        self._on_damage = on_damage
        self._start()

    def restart(self) -> None:
        """Begin again in a forked child, which has no threads: some pieces were taken by one."""
        for check in self._checks:
            if not check.state:
                check.next = check.done = 0
        self._start()

    def _start(self) -> None:
        threading.Thread(
            target=_look_after,
            args=(weakref.ref(self), self._stop, _look_every()),
            name="embedlm-weights",
            daemon=True,
        ).start()

    def compare(self, index: int) -> bool:
        """Compare the weight with this number, if there is one: whether there was."""
        if index >= len(self._checks):
            return False
        if self._library.embedlm_check(byref(self._checks[index])):
            self._on_damage()
        return True

    def give_lease(self) -> bool:
        """If somebody waits for the file, put a private copy in the place of the mapping and give
        the lease back. Returns whether the lease is gone."""
        if self.copied:
            return True
        if not self._lease.is_wanted:
            return False
        self.copied = "somebody wanted to change the file in the cache"
        for start, nbytes in self._chunks():
            at = self._base + start
            error = self._library.embedlm_read_over(self._lease.file, start, at, nbytes)
            if error:
                self._give_up(start, error)
                break
        self._without_file()
        self._lease.close()
        return True

    def _without_file(self) -> None:
        """What was not copied must not be read from the file any more: it has wrong sums now."""
        for check in self._later:
            check.state = _WRONG
        end = 0
        for start, nbytes in [*self._used, (self.size, 0)]:
            if start > end:
                self._library.embedlm_read_over(-1, 0, self._base + end, start - end)
            end = start + nbytes

    def _give_up(self, start: int, error: int) -> None:
        """The bytes from ``start`` on cannot be copied. An access must not end the process, and
        nothing may be computed with them."""
        for check in self._checks:
            check.state = _WRONG
        self._library.embedlm_read_over(-1, 0, self._base + start, self.size - start)
        logger.error(
            "packed weights: another process changes their file in the cache, and they cannot be "
            "copied (%s); load the model again",
            os.strerror(error),
        )

    def _chunks(self) -> list[tuple[int, int]]:
        """What is copied, in parts: where they begin, and their bytes."""
        return [
            (start, min(_CHUNK, first + nbytes - start))
            for first, nbytes in self._used
            for start in range(first, first + nbytes, _CHUNK)
        ]

    def _copy(self, threads: int) -> None:
        chunks = deque(self._chunks())
        errors: list[int] = []

        def copy() -> None:
            while chunks:
                with contextlib.suppress(IndexError):  # another thread took the last one
                    start, nbytes = chunks.popleft()
                    at = self._base + start
                    if error := self._library.embedlm_read_over(
                        self._lease.file, start, at, nbytes
                    ):
                        errors.append(error)

        helpers = [threading.Thread(target=copy) for _ in range(threads - 1)]
        for helper in helpers:
            helper.start()
        copy()
        for helper in helpers:
            helper.join()
        if errors:
            raise KernelError(
                f"packed weights: their file in the cache cannot be read: {os.strerror(errors[0])}"
            )
        self._lease.close()


def _look_after(found: weakref.ref[WeightMap], stop: threading.Event, seconds: float) -> None:
    """In a thread of its own, which does not keep the weights."""
    index, more = 0, True
    while more:
        weights = found()
        if weights is None or stop.is_set():
            return
        weights.give_lease()
        more = weights.compare(index)
        index += 1
        del weights
    while not stop.wait(seconds):
        weights = found()
        if weights is None or weights.give_lease():
            return
        del weights


def _pages(used: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Whole pages, which the parts do not share; the last one ends with the file."""
    parts = []
    for start, nbytes in used:
        end = min(-(-(start + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE, size)
        parts.append((start, end - start))
    return parts


def _look_every() -> float:
    """Seconds: an eighth of what the system lets others wait."""
    patience = SYSTEM.lease_seconds()
    return min(_LOOK, patience / 8) if patience else _LOOK


def _end(stop: threading.Event, lease: Lease) -> None:
    stop.set()
    lease.close()


def _nothing() -> None:
    pass
