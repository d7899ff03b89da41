"""Rows of a matrix that stay in its file: each is read when it is looked up.

A table with a row for each token of which a step needs a few (embeddings of layers) need not be in
memory. The operating system keeps what is read often in its cache of the file.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from sdk.kernels.backend import Problem
from sdk.kernels.context import Context
from sdk.kernels.dataclass import dataclass
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.checks import expect

#: Columns of a row that are decoded at a time: kStoredColumns of native/abi.hpp.
STORED_COLUMNS = 256


def open_rows(stored: StoredRows, context: Context) -> OpenRows | None:
    """``None``: no kernel of this device reads such rows from their file."""
    problem = Problem("stored_rows", format=stored.kind, in_features=stored.shape[1])
    kernels = (kernel for kernel in _readers(context) if kernel.reject(problem) is None)
    found = next(kernels, None)
    return None if found is None else OpenRows(stored, found, context)


def _readers(context: Context) -> list[Any]:
    backends = context.backends
    return [one for each in backends for one in each.implementations("stored_rows")]


@dataclass(frozen=True, slots=True)
class StoredRows:
    """A matrix in an open file, its rows ``row_bytes`` apart from byte ``offset`` on.

    ``kind``: a block type (:data:`sdk.kernels.weights.layouts.BLOCK_TYPES`), or ``float32``,
    ``float16`` or ``bfloat16``. ``descriptor`` is closed by whoever made it; operators have a copy
    of their own.
    """

    shape: tuple[int, int]
    kind: str
    descriptor: int
    offset: int
    row_bytes: int


class OpenRows:
    """Rows that a kernel reads, with a descriptor of their own."""

    def __init__(self, stored: StoredRows, kernel: Any, context: Context) -> None:
        self.shape = stored.shape
        self.context = context
        self._kernel = kernel
        descriptor = os.dup(stored.descriptor)
        weakref.finalize(self, os.close, descriptor)
        own = StoredRows(stored.shape, stored.kind, descriptor, stored.offset, stored.row_bytes)
        self._opened = kernel.open(own)

    def shared(self, context: Context) -> OpenRows:
        """The same rows for another engine of this process."""
        return OpenRows(self._opened[0], _readers(context)[0], context)

    def rows(self, ids: Tensor) -> Tensor:
        """``w[ids]``, dequantized exactly: ids int64 ``[T]`` -> float32 ``[T, columns]``.

        Rows that cannot be read any more, because the file was truncated, are NaN.
        """
        expect("rows ids", ids, torch.int64, None)
        if ids.numel() and self.context.capture_pool is None:
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.shape[0]:
                bad = low if low < 0 else high
                raise KernelError(f"rows: expected ids in 0..{self.shape[0] - 1}, found {bad}")
        out = self.context.empty(ids.shape[0], self.shape[1])
        if ids.numel():
            self._kernel.run(self._opened, ids.contiguous(), out)
        return out
