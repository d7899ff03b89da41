"""A weight that is packed some rows at a time is, bit for bit, the one packed as a whole."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from sdk.kernels.cpu import CpuBackend
from sdk.kernels.cpu.packed_weight import Packed
from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference.linear import slice_rows
from sdk.kernels.weights.layouts import BLOCK_TYPES, PIECE_ROWS, Blocks, Dense, Layout, Pieces
from tests.kernels.plain_kernels import plain_kernels

DENSE = [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]


def tensors(packed: Packed) -> dict[str, bytes]:
    """The bytes of a packed weight."""
    values = {field.name: getattr(packed, field.name) for field in fields(packed)}
    return {
        name: value.view(torch.uint8).numpy().tobytes()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }


def layouts(cases: Any, kind: Any, rows: int) -> Layout:
    if isinstance(kind, str):
        found: Layout = cases.blocks(rows, 512, kind)
    else:
        found = cases.dense(rows, 70, kind)
    return found


@pytest.mark.quick_cases(40)
@pytest.mark.parametrize("kind", [*BLOCK_TYPES, *DENSE], ids=str)
@pytest.mark.parametrize("rows", [PIECE_ROWS + 1, 3 * PIECE_ROWS, 5 * PIECE_ROWS + 17])
def test_pieces_give_the_same_bytes(backend: CpuBackend, cases: Any, kind: Any, rows: int) -> None:
    layout = layouts(cases, kind, rows)
    kernel = plain_kernels(backend, "linear")[0]
    whole = kernel.pack(layout)
    for step in (PIECE_ROWS, 2 * PIECE_ROWS, 8 * PIECE_ROWS):
        read = slice_reader(layout)
        packed = kernel.pack_pieces(rows, Pieces((rows, layout.shape[1]), read, step).pieces())
        backend.finish_packing()
        assert tensors(packed) == tensors(whole)
        assert cases.same(kernel.unpack(packed), layout)


def slice_reader(layout: Layout) -> Any:
    def read(start: int, count: int) -> Layout:
        part = slice_rows(layout, start, start + count)
        assert isinstance(part, Blocks | Dense)
        if isinstance(part, Blocks):
            return replace(part, data=part.data.clone())
        return Dense(part.values.clone())

    return read


@pytest.mark.parametrize("backends", [("cpu", "reference"), ("reference",)])
def test_products_and_rows_of_pieces_are_those_of_the_whole(cases: Any, backends: Any) -> None:
    layout = cases.blocks(100, 512, "q4_k")
    ops = Ops("cpu", num_threads=2, backends=backends)
    try:
        whole = ops.linear(layout)
        pieces = ops.linear(Pieces(layout.shape, slice_reader(layout), PIECE_ROWS))
        x = cases.activations(3, 512)
        assert torch.equal(whole.matmul(x), pieces.matmul(x))
        ids = torch.tensor([0, 31, 32, 99])
        assert torch.equal(whole.rows(ids), pieces.rows(ids))
        assert pieces.shape == whole.shape
        assert pieces.problem == whole.problem
    finally:
        ops.close()


def test_a_piece_that_cannot_be_read_is_the_caller_s_error(cases: Any) -> None:
    layout = cases.blocks(100, 512, "q4_k")

    def read(start: int, count: int) -> Layout:
        if start:
            raise OSError("gone")
        return slice_rows(layout, start, start + count)

    ops = Ops("cpu", num_threads=1)
    try:
        with pytest.raises(OSError, match="gone"):
            ops.linear(Pieces(layout.shape, read, PIECE_ROWS))
        assert ops.linear(layout).nbytes > 0
    finally:
        ops.close()
