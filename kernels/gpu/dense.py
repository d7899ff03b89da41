"""Products with plain weights: the library's, which needs no help from us."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from sdk.kernels.experts import Routes
from sdk.kernels.gpu import product_dense as kernels
from sdk.kernels.gpu.expert_tiles import Experts, Routed, offsets_of, tile_arguments
from sdk.kernels.gpu.launch import INTERPRETED, Launch, expect_on_device
from sdk.kernels.layouts import Dense, Layout
from sdk.kernels.registry import Problem

#: Bytes that the weights of experts must begin at multiples of: 16 elements of 4.
_ALIGNED = 64
_BLOCK_K = 64
_TYPES = ("float32", "float16", "bfloat16")


class DenseLinear:
    """See :class:`sdk.kernels.registry.LinearKernel`.

    x is rounded to the weight's type; ``fixed``: the library's order of additions depends on the
    number of tokens, so nothing is accepted.
    """

    name = "gpu.dense"

    def __init__(self, *, fixed: bool = False) -> None:
        self._fixed = fixed

    def reject(self, problem: Problem) -> str | None:
        if problem.layout != "dense" or problem.format not in _TYPES:
            return f"{problem.format} {problem.layout}: expected dense {', '.join(_TYPES)}"
        if self._fixed:
            return "the library's order of additions depends on the batch"
        if problem.compute == "exact" and problem.format != "float32":
            return f"rounds activations to {problem.format}, compute is exact"
        return None

    def pack(self, layout: Layout) -> Dense:
        assert isinstance(layout, Dense)
        return layout

    def unpack(self, packed: Dense) -> Layout:
        return packed

    def nbytes(self, packed: Dense) -> int:
        return packed.nbytes

    def matmul(self, packed: Dense, x: Tensor, out: Tensor) -> None:
        multiply(x.to(packed.values.dtype), packed.values, out)

    def rows(self, packed: Dense, ids: Tensor, out: Tensor) -> None:
        out.copy_(packed.values[ids])

    def group(self, packed: Sequence[Dense]) -> Experts[Dense] | None:
        values = [p.values for p in packed]
        if any(not v.is_contiguous() or v.data_ptr() % _ALIGNED for v in values):
            return None
        offsets = offsets_of([{"w": v} for v in values])
        return None if offsets is None else Experts(tuple(packed), offsets)

    def matmul_routed(
        self, group: Experts[Dense], x: Tensor, routes: Routes, by_token: bool, out: Tensor
    ) -> None:
        expect_on_device("linear of experts", x, out, group.offsets)
        product_dense(group, x, routes, routes.tokens if by_token else None, out).run()


def product_dense(
    group: Experts[Dense], x: Tensor, routes: Routes, sources: Tensor | None, out: Tensor
) -> Launch:
    """``product_dense`` of all rows, which have ``sources`` in x or a row of x each."""
    w = group.first.values
    (n, k), rows = w.shape, out.shape[0]
    routed = Routed(group.offsets, routes, sources)
    block_m = min(64, max(16, triton.next_power_of_2(-(-rows // group.count))))
    arguments = {"x": x, "out": out, "w": w, **tile_arguments(routed), "N": n, "K": k}
    arguments |= {"x_stride": x.stride(0), "out_stride": out.stride(0)}
    constants: dict[str, Any] = {
        "WIDEN": w.dtype == torch.bfloat16 and INTERPRETED,
        "EVEN": k % _BLOCK_K == 0,
    }
    constants |= {"BLOCK_N": 64, "BLOCK_M": block_m, "BLOCK_K": _BLOCK_K}
    grid = (-(-n // 64), routed.tiles(block_m), 1)
    options = {"num_warps": 4, "num_stages": 3}
    return Launch(kernels.product_dense, grid, arguments, constants, options)


def multiply(x: Tensor, w: Tensor, out: Tensor) -> None:
    """``out = x @ w.T`` with x and w of one type; on a GPU the sums are rounded to out's only."""
    if out.dtype == x.dtype:
        torch.mm(x, w.t(), out=out)
    elif x.is_cuda and x.dtype != torch.float32:
        out.copy_(torch.mm(x, w.t(), out_dtype=torch.float32))
    else:
        out.copy_(torch.mm(x, w.t()))
