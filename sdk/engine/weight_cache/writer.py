"""Writes packed weights into the cache while a model loads, in a thread that gets out of the way.

The thread has the lowest priority, and only it waits for the disk. The file appears with one rename
once everything in it is on the disk. Whatever goes wrong means that there is no file.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sdk.api.sizes import format_bytes
from sdk.engine.weight_cache.folder import PART, PREAMBLE, WEIGHTS, locked_part, made_folder, prune
from sdk.engine.weight_cache.index import Index
from sdk.kernels.cpu.packed_record import bytes_of
from sdk.kernels.cpu.weight_map import PIECE
from sdk.kernels.lazy_torch import Tensor, type_name
from sdk.kernels.system import SYSTEM

#: Pieces begin at pages, tensors at cache lines.
_PAGE, _LINE = 4096, 64
#: Written bytes after which the thread waits for the disk: more would fill the system's memory with
#: pages that nobody can use before they are written.
_AT_A_TIME = 64 << 20
#: What stays free on the disk.
FREE = 1 << 30
#: Seconds between two calls of ``alive`` while the disk is waited for.
_ALIVE = 0.1
logger = logging.getLogger("sdk")


class NotKept(Exception):
    """Why weights are not in the cache."""


class WeightWriter:
    """Writes one file ``NAME.weights``. ``waits``: somebody waits for it, so it does not get out of
    the way of everything else.

    :raises NotKept: another process writes it now, or the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        about: bytes,
        most: int,
        library: ctypes.CDLL,
        *,
        waits: bool = False,
    ) -> None:
        self._waits = waits
        self._folder, self._name, self._most, self._library = folder, name, most, library
        self._process = os.getpid()
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._cancelled = threading.Event()
        self._index = Index()
        #: What became of it.
        self.state = "being written"
        try:
            made_folder(folder)
            part = locked_part(folder / f"{name}{PART}")
        except OSError as error:
            raise NotKept(f"the cache cannot be written: {error}") from error
        if part is None:
            raise NotKept("another process writes them into the cache now")
        self._file, self._size, self._flushed = part, 0, 0
        self._about = about
        self._thread = threading.Thread(
            target=self._run, name="embedlm-weights-writer", daemon=True
        )
        self._thread.start()

    def add(self, record: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Write a packed weight, whose tensors do not change any more, and complete its record."""
        self._queue.put((record, tensors))

    def drain(self, alive: Callable[[], None]) -> None:
        """Wait until what was added is written: its memory is needed for the next weights.
        ``alive`` is called now and then meanwhile, and may raise an exception."""
        done = threading.Event()
        self._queue.put(done)
        while not done.wait(_ALIVE) and self._thread.is_alive():
            alive()

    def small(self, tensor: Tensor) -> list[Any]:
        """What stands for a small tensor in a record."""
        return self._index.small(
            bytes_of(tensor.contiguous()), type_name(tensor.dtype), tensor.shape
        )

    def finish(self, matrices: Mapping[str, Any], unused: list[str]) -> None:
        """Everything was added."""
        self._queue.put((matrices, unused, None))

    def close(self) -> None:
        """Forget what is not complete. Idempotent; in a forked child nothing happens."""
        if os.getpid() == self._process:
            self._cancelled.set()
            self._queue.put(None)
            self._thread.join(timeout=5.0)

    def wait(self, alive: Callable[[], None]) -> None:
        """Until the file is complete, or is given up. ``alive``: as in :meth:`drain`."""
        while self._thread.is_alive():
            self._thread.join(_ALIVE)
            alive()

    def _run(self) -> None:
        if not self._waits:
            with contextlib.suppress(OSError):
                SYSTEM.lower_priority(19)
        part = self._folder / f"{self._name}{PART}"
        try:
            self._write(self._about.ljust(PREAMBLE, b"\0"))
            while (item := self._queue.get()) is not None:
                if isinstance(item, threading.Event):
                    item.set()
                    continue
                if len(item) != 2:
                    break
                self._write_weight(*item)
                del item  # the tensors
            if item is None:
                raise NotKept("the engine was closed before all were written")
            self._complete(item[0], item[1], part)
            self.state = "written"
        except (OSError, NotKept) as error:
            self.state = f"not written: {error}"
            logger.debug("weights are not kept in %s: %s", self._folder, error)
            with contextlib.suppress(OSError):
                part.unlink()
        finally:
            os.close(self._file)
            while not self._queue.empty():
                self._queue.get()

    def _write_weight(self, record: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Its tensors one after another, in pieces that each have a sum."""
        self._write(bytes(-self._size % _PAGE))
        begin, at, places, data = self._size, 0, {}, []
        for name, tensor in tensors.items():
            at += -at % _LINE
            places[name] = [at, type_name(tensor.dtype), list(tensor.shape)]
            data.append((at, bytes_of(tensor)))
            at += tensor.nbytes
        record["at"], record["bytes"], record["tensors"] = begin, at, places
        record["sum"] = len(self._index.sums)
        for start in range(0, at, PIECE):
            piece = np.zeros(min(PIECE, at - start), np.uint8)
            for place, part in data:
                low, high = max(place, start), min(place + part.nbytes, start + piece.nbytes)
                if low < high:
                    piece[low - start : high - start] = part[low - place : high - place]
            self._index.sums.append(self._library.embedlm_sum(piece.ctypes.data, piece.nbytes))
            self._write(piece.data)

    def _write(self, data: bytes | memoryview) -> None:
        end = self._size + len(data)
        if self._cancelled.is_set():
            raise NotKept("the engine was closed before all were written")
        if end > self._most:
            raise NotKept(
                f"they are larger than the cache may be ({format_bytes(self._most)}): "
                "pass a larger weight_cache"
            )
        limit = SYSTEM.file_size_limit()
        if limit is not None and end > limit:  # a signal would end other processes
            raise NotKept(f"the process may not write files of more than {format_bytes(limit)}")
        while len(data):
            done = SYSTEM.write_at(self._file, data, self._size)
            self._size, data = self._size + done, data[done:]
        if self._size - self._flushed >= _AT_A_TIME:
            self._flush()

    def _flush(self) -> None:
        self._flushed = self._size
        SYSTEM.sync_data(self._file)
        if shutil.disk_usage(self._folder).free < FREE:
            raise NotKept(f"less than {format_bytes(FREE)} are free on the disk")

    def _complete(self, matrices: Mapping[str, Any], unused: list[str], part: Path) -> None:
        self._write(bytes(-self._size % _PAGE))
        self._write(self._index.to_bytes(self._name, self._size, matrices, unused, self._library))
        os.fsync(self._file)
        prune(self._folder, self._most - self._size)
        SYSTEM.replace_file(part, self._folder / f"{self._name}{WEIGHTS}")
        SYSTEM.sync_folder(self._folder)
