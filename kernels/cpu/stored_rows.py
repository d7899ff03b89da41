"""Rows that stay in their file: ``gather_stored_rows`` of ``native/pack.cpp``."""

from __future__ import annotations

from ctypes import addressof

from sdk.kernels.backend import Problem
from sdk.kernels.cpu.library import EmbeddingArgs, OpKind
from sdk.kernels.cpu.packed_weight import BLOCK_SOURCES, Packed, prepared
from sdk.kernels.cpu.runtime import NativeRuntime
from sdk.kernels.cpu.weight_memory import WeightMemory
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.weights.layouts import BLOCK_TYPES, Blocks, Dense, Layout
from sdk.kernels.weights.stored_rows import STORED_COLUMNS, StoredRows

_FLOATS = ("float32", "float16", "bfloat16")


class ReadRows:
    """See :class:`sdk.kernels.weights.stored_rows.OpenRows`."""

    name = "cpu.stored_rows"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        if problem.format not in (*_FLOATS, *BLOCK_SOURCES):
            return f"rows of {problem.format}: expected {', '.join((*_FLOATS, *BLOCK_SOURCES))}"
        if problem.in_features % STORED_COLUMNS:
            found = problem.in_features
            return f"{found} columns: expected a multiple of {STORED_COLUMNS}"
        return None

    def open(self, stored: StoredRows) -> tuple[StoredRows, Packed]:
        """The rows, and what describes a part of one to the library."""
        layout: Layout
        if stored.kind in _FLOATS:
            layout = Dense(torch.empty(1, STORED_COLUMNS, dtype=getattr(torch, stored.kind)))
        else:
            block = BLOCK_TYPES[stored.kind]
            nbytes = STORED_COLUMNS // block.elements * block.nbytes
            data = torch.zeros(1, nbytes, dtype=torch.uint8)
            layout = Blocks((1, STORED_COLUMNS), stored.kind, data)
        return stored, prepared(layout, 1, WeightMemory())

    def run(self, opened: tuple[StoredRows, Packed], ids: Tensor, out: Tensor) -> None:
        stored, part = opened
        args = EmbeddingArgs(
            addressof(part.view),
            ids.data_ptr(),
            out.data_ptr(),
            None,
            0,
            stored.shape[0],
            stored.offset,
            stored.row_bytes,
            stored.shape[1],
            stored.descriptor,
        )
        self._runtime.run(OpKind.EMBEDDING, args, ids.shape[0], "rows")
