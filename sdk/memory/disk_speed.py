"""How fast a disk reads what a model that is larger than memory needs: matrices here and there."""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from sdk.kernels.system import SYSTEM

#: Bytes of a read, about those of an expert's matrix, and how many there are: 64 MiB take 30 to
#: 600 ms.
_READ, _READS = 2 << 20, 32
#: As many as read experts (kernels/cpu/expert_cache.py).
_THREADS = 4


def disk_bandwidth(path: str | os.PathLike[str]) -> float | None:
    """Bytes per second, from reads at random places of a model's largest file, past the system's
    page cache; ``None``: there is no file, it is smaller than they are, or its file system reads
    through the cache alone.
    """
    try:
        largest = max(_files(Path(path)), key=lambda one: one.stat().st_size)
        cached = SYSTEM.open_file(largest, os.O_RDONLY)
    except (OSError, ValueError):
        return None
    try:
        file = SYSTEM.reopen(cached, direct=True)
    except OSError:
        return None
    finally:
        os.close(cached)
    try:
        return _read(file)
    except OSError:
        return None
    finally:
        os.close(file)


def _files(path: Path) -> list[Path]:
    return [one for one in path.iterdir() if one.is_file()] if path.is_dir() else [path]


def _read(file: int) -> float | None:
    places = range(os.fstat(file).st_size // _READ)
    if len(places) < _READS:
        return None
    left = iter(random.Random(0).sample(places, _READS))
    failures: list[OSError] = []

    def read() -> None:
        with mmap.mmap(-1, _READ) as memory:
            try:
                for place in _taken(left, lock):
                    SYSTEM.read_at(file, memory, place * _READ)
            except OSError as error:
                failures.append(error)

    lock = threading.Lock()
    threads = [threading.Thread(target=read) for _ in range(_THREADS)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return _READ * _READS / (time.perf_counter() - begin)


def _taken(left: Iterator[int], lock: threading.Lock) -> Iterator[int]:
    """What is left, one at a time, each to one thread."""
    while True:
        with lock:
            place = next(left, None)
        if place is None:
            return
        yield place
