"""``y = x @ w.T`` with the weight dequantized on the fly; always fp32 arithmetic on exact values.

Matches float64 to NMSE 1e-12. A library GEMM chooses its blocking by the number of rows, which
changes the order of additions. Here every product is ``[16, K] x [K, n]`` with n a multiple of 16,
so a row gets the same bits at every batch size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sdk.kernels.backend import Problem
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.routes import Routes
from sdk.kernels.reference.decode import decode, flat_scales, nested_supers, with_rows
from sdk.kernels.reference.fake_quantize import fake_quantize
from sdk.kernels.weights.layouts import Affine, Blocks, Dense, Float8, Layout, inputs_of

ROW_TILE = 16
#: Output rows dequantized at a time: limits scratch to 2048 * K * 4 bytes (12 MiB at K = 1536).
OUT_TILE = 2048


class ReferenceLinear:
    """See :class:`sdk.kernels.backend.LinearKernel`."""

    name = "reference.linear"
    reads_parts = False
    packs_pieces = False
    gates = False

    def reject(self, problem: Problem) -> str | None:
        return None if not problem.inputs else f"the file asks for activations in {problem.inputs}"

    def rounding(self, packed: object) -> None:
        """Rows are floats."""

    def pack(self, layout: Layout) -> Layout:
        return layout

    def unpack(self, packed: Layout) -> Layout:
        return packed

    def matmul(self, packed: Layout, x: Tensor, out: Tensor) -> None:
        for start in range(0, packed.shape[0], OUT_TILE):
            stop = min(start + OUT_TILE, packed.shape[0])
            out[:, start:stop] = multiply(x.float(), decode(slice_rows(packed, start, stop)))

    def rows(self, packed: Layout, ids: Tensor, out: Tensor) -> None:
        out.copy_(decode(gather_rows(packed, ids)))

    def nbytes(self, packed: Layout) -> int:
        return packed.nbytes

    def group(self, packed: Sequence[Layout]) -> Sequence[Layout]:
        return packed

    def matmul_routed(
        self, group: Sequence[Layout], x: Tensor, routes: Routes, by_token: bool, out: Tensor
    ) -> None:
        for expert, rows, own in routes.parts(x, by_token):
            self.matmul(group[expert], own, out[rows])

    def matmul_heads(self, group: Sequence[Layout], x: Tensor, out: Tensor) -> None:
        for head, own in enumerate(group):
            self.matmul(own, x[:, head], out[:, head])


class ReferenceLinearAsFile(ReferenceLinear):
    """Quantizes activations as the weight's file asks (``fake_quantize.py``)."""

    name = "reference.linear_as_file"

    def reject(self, problem: Problem) -> str | None:
        return None

    def matmul(self, packed: Layout, x: Tensor, out: Tensor) -> None:
        scheme = inputs_of(packed)
        super().matmul(packed, x if scheme is None else fake_quantize(x.float(), scheme), out)


def multiply(x: Tensor, w: Tensor) -> Tensor:
    """``x @ w.T`` in tiles, float32: x ``[M, K]``, w ``[N, K]``.

    On a GPU in float64: the host may have let torch round float32 products there.
    """
    (tokens, _), count = x.shape, w.shape[0]
    if x.is_cuda:
        x, w = x.double(), w.double()
    x = torch.nn.functional.pad(x, (0, 0, 0, -tokens % ROW_TILE))
    w = torch.nn.functional.pad(w, (0, 0, 0, -count % ROW_TILE))
    tiles = [torch.mm(tile, w.t()) for tile in torch.split(x, ROW_TILE)]
    return torch.cat(tiles)[:tokens, :count].float()


def slice_rows(layout: Layout, start: int, stop: int, step: int = 1) -> Layout:
    """Output rows ``start:stop:step`` of a weight, as views."""
    return _index_rows(layout, slice(start, stop, step), len(range(start, stop, step)))


def gather_rows(layout: Layout, ids: Tensor) -> Layout:
    """Output rows ``ids`` (int64 ``[T]``) of a weight, copied."""
    return _index_rows(layout, ids, ids.shape[0])


def reorder_rows(layout: Layout, order: Tensor) -> Layout | None:
    """A weight with its output row ``order[j]`` (int64 ``[N]``, each once) in place j, copied.

    ``None`` where scales are shared by rows that would be apart: all rows that share them would
    need their own.
    """
    match layout:
        case Float8(block=(high, _)) if high > 1:
            blocks = np.arange(layout.shape[0]) // high
            if not np.array_equal(order.numpy() // high, blocks):
                return None
            return replace(layout, values=layout.values[order])
        case Affine() if layout.repeats or layout.scale_table is not None:
            return None
    return gather_rows(layout, order)


def _index_rows(layout: Layout, index: slice | Tensor, count: int) -> Layout:
    shape = (count, layout.shape[1])
    match layout:
        case Dense():
            return Dense(layout.values[index])
        case Float8():
            return _index_float8(layout, index)
        case Blocks():
            return Blocks(shape, layout.type, layout.data[index])
        case Affine() if layout.repeats:
            found = replace(layout, shape=shape, codes=layout.codes[index])
            height = layout.scale.shape[0]
            run = isinstance(index, slice) and index.step == 1 and index.start % height == 0
            if run and count and count % height == 0:
                return found
            rows = torch.arange(layout.shape[0], device=layout.codes.device)[index]
            return with_rows(found, rows)
        case Affine():
            found = replace(
                layout,
                shape=shape,
                codes=layout.codes[index],
                scale=layout.scale[index],
                zeros=None if layout.zeros is None else layout.zeros[index],
                minus=None if layout.minus is None else layout.minus[index],
            )
            if layout.scale_table is not None:
                return _index_nested(layout, found, index)
            if layout.super_scale is not None:
                return replace(found, super_scale=layout.super_scale[index])
            return found


def _index_nested(w: Affine, found: Affine, index: slice | Tensor) -> Affine:
    """``found`` with the scales of rows ``index`` of ``w``.

    For a run of rows, super scales cover as many scales as its start allows; other selections get
    one level of scales.
    """
    assert w.super_scale is not None and w.scale_offset is not None
    found = replace(found, scale_offset=w.scale_offset[index])
    groups, count = w.scale.shape[1], w.super_group // w.group
    if isinstance(index, slice) and index.step == 1:
        part = math.gcd(count, index.start * groups)
        first, last = index.start * groups // part, -(-index.stop * groups // part)
        of = torch.arange(first, last, device=w.scale.device) // (count // part)
        return replace(found, super_scale=w.super_scale[of], super_group=part * w.group)
    rows = torch.arange(w.shape[0], device=w.scale.device)[index]
    supers = nested_supers(w, rows).flatten()
    return flat_scales(replace(found, super_scale=supers, super_group=w.group))


def _index_float8(w: Float8, index: slice | Tensor) -> Float8:
    """Whole blocks of rows keep their scales; other rows get one scale each."""
    high, wide = w.block
    if isinstance(index, slice) and index.start % high == 0 and index.step == 1:
        scale = w.scale[index.start // high : -(-index.stop // high)]
        return replace(w, values=w.values[index], scale=scale)
    rows = torch.arange(w.shape[0], device=w.scale.device)[index]
    return replace(w, values=w.values[index], scale=w.scale[rows // high], block=(1, wide))
