"""The index at the end of a file of the cache: which matrix lies where, sums, small tensors.

Its last 64 bytes say where it begins and what its sum is. A file without them, or of another size,
is not complete.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.cpu.packed_record import tensor_of
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.system import SYSTEM

#: Magic, where the index begins, bytes of its JSON text, its sums, bytes of its small tensors, the
#: sum of all these, and the size of the file.
_END = struct.Struct("<8sQQQQQQ8x")
_MAGIC = b"embedlmW"
_LINE = 64
#: An index of 18 GB of experts takes 8 MB.
_MOST_BYTES = 1 << 30


class DamagedError(Exception):
    """A file of the cache is not what was written."""


class Index:
    """Empty, for a writer; or what :meth:`read` found."""

    def __init__(self) -> None:
        #: Of pieces, in the order of the file.
        self.sums: list[int] = []
        self.matrices: Mapping[str, Any] = {}
        self.unused: list[str] = []
        #: Where the index begins, and so the weights end.
        self.begin = 0
        self._small = bytearray()

    def small(self, data: NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> list[Any]:
        """Keep a small tensor; what :meth:`tensor` takes."""
        at = len(self._small) + -len(self._small) % _LINE
        self._small += bytes(at - len(self._small)) + data.tobytes()
        return [at, dtype, list(shape)]

    def tensor(self, found: Sequence[Any]) -> Tensor:
        """A copy of a small tensor."""
        at, dtype, shape = found
        nbytes = getattr(torch, dtype).itemsize * math.prod(shape)
        if not 0 <= at <= at + nbytes <= len(self._small):
            raise DamagedError("a small tensor lies outside of the file")
        data = np.frombuffer(bytes(self._small[at : at + nbytes]), np.uint8).copy()
        return tensor_of(data, dtype, tuple(shape))

    def to_bytes(
        self,
        key: str,
        begin: int,
        matrices: Mapping[str, Any],
        unused: list[str],
        library: ctypes.CDLL,
    ) -> bytes:
        """The end of a file, from its byte ``begin`` on. ``key``: of the weights."""
        text = json.dumps({"key": key, "matrices": matrices, "unused": unused}).encode()
        sums = np.asarray(self.sums, np.uint64)
        body = text + bytes(-len(text) % _LINE) + sums.tobytes() + bytes(self._small)
        size = begin + len(body) + _END.size
        numbers = begin, len(text), len(sums), len(self._small)
        return body + _END.pack(_MAGIC, *numbers, _sum(body, numbers, size, library), size)

    @classmethod
    def read(cls, file: int, key: str, library: ctypes.CDLL) -> Index:
        """:raises DamagedError: it is not what was written. :raises OSError: it cannot be read."""
        size = os.fstat(file).st_size
        end = _read(file, _END.size, max(size - _END.size, 0))
        if len(end) != _END.size or end[:8] != _MAGIC:
            raise DamagedError("it has no end")
        _, begin, text, count, small, expected, written = _END.unpack(end)
        length = text + -text % _LINE + 8 * count + small
        if written != size or begin + length + _END.size != size or length > _MOST_BYTES:
            raise DamagedError(f"expected {written} bytes, found {size}")
        body = _read(file, length, begin)
        if (
            len(body) != length
            or _sum(body, (begin, text, count, small), size, library) != expected
        ):
            raise DamagedError("the sum of its index is wrong")
        found, index = json.loads(body[:text]), cls()
        if found["key"] != key:
            raise DamagedError(f"it has the weights of {found['key']}")
        index.matrices, index.unused, index.begin = found["matrices"], found["unused"], begin
        index.sums = np.frombuffer(body, np.uint64, count, text + -text % _LINE).tolist()
        index._small = bytearray(body[length - small :])
        return index


def _sum(body: bytes, numbers: Sequence[int], size: int, library: ctypes.CDLL) -> int:
    whole = np.frombuffer(body + struct.pack("<5Q", *numbers, size), np.uint8)
    found: int = library.embedlm_sum(whole.ctypes.data, whole.nbytes)
    return found


def _read(file: int, nbytes: int, start: int) -> bytes:
    data = bytearray(nbytes)
    return bytes(data[: SYSTEM.read_at(file, memoryview(data), start)])
