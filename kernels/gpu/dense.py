"""Products with float weights: of 16 bits by the vendor's library, of float32 by a kernel of ours,
because the host may let the library round them (plain_product.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.gpu import product_dense as kernels
from sdk.kernels.gpu.expert_tiles import Experts, Routed, offsets_of, tile_arguments
from sdk.kernels.gpu.launch import INTERPRETED, Launch, expect_on_device, old_card
from sdk.kernels.gpu.plain_product import library_rounds, plain_product
from sdk.kernels.gpu.scratch import columns_at_once, runs
from sdk.kernels.layouts import Dense, Layout
from sdk.kernels.routes import Routes

#: Alignment in bytes of the weights of experts: 16 elements of 4 bytes.
_ALIGNED = 64
_TYPES = ("float32", "float16", "bfloat16")


class DenseLinear:
    """See :class:`sdk.kernels.registry.LinearKernel`.

    x is rounded to the weight's type. With ``fixed`` everything is rejected, because the library's
    order of additions depends on the number of tokens.
    """

    name = "gpu.dense"
    reads_parts = False
    gates = False

    def __init__(self, *, fixed: bool = False) -> None:
        self._fixed = fixed

    def reject(self, problem: Problem) -> str | None:
        if problem.layout != "dense" or problem.format not in _TYPES:
            return f"{problem.format} {problem.layout}: expected dense {', '.join(_TYPES)}"
        if self._fixed:
            return "the library's order of additions depends on the batch"
        if problem.compute == "exact" and problem.format != "float32":
            return f"rounds activations to {problem.format}, but compute is exact"
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

    def group(self, packed: Sequence[Dense]) -> Any:
        values = [p.values for p in packed]
        if any(not v.is_contiguous() or v.data_ptr() % _ALIGNED for v in values):
            return None
        offsets = offsets_of([{"w": v} for v in values])
        return None if offsets is None else Experts(tuple(packed), offsets)

    def matmul_routed(
        self, group: Any, x: Tensor, routes: Routes, by_token: bool, out: Tensor
    ) -> None:
        expect_on_device("linear of experts", x, out, group.offsets)
        routed = Routed(group.offsets, routes, routes.tokens if by_token else None)
        product_dense(group.first.values, x, routed, range(group.count), out).run()


class ExactDenseLinear(DenseLinear):
    """Exact products with weights of 16 bits: x is not rounded, and K is added up in one order."""

    name = "gpu.dense_exact"

    def reject(self, problem: Problem) -> str | None:
        if problem.layout != "dense" or problem.format not in _TYPES[1:]:
            return f"{problem.format} {problem.layout}: expected dense {', '.join(_TYPES[1:])}"
        return None if problem.compute == "exact" else "compute is not exact"

    def matmul(self, packed: Dense, x: Tensor, out: Tensor) -> None:
        plain_product(x.float(), packed.values, out).run()

    def group(self, packed: Sequence[Dense]) -> Any:
        return tuple(packed)

    def matmul_routed(
        self, group: Any, x: Tensor, routes: Routes, by_token: bool, out: Tensor
    ) -> None:
        """One product for each expert, whose rows the host asks for."""
        for expert, rows, own in routes.parts(x, by_token):
            self.matmul(group[expert], own, out[rows])


def product_dense(w: Tensor, x: Tensor, routed: Routed, experts: range, out: Tensor) -> Launch:
    """``product_dense`` of the rows of ``experts``; ``offsets`` count from w ``[N, K]``."""
    n, k = w.shape
    rows = -(-out.shape[0] // routed.experts)
    # Plain units multiply float32, and every number of an old card: each of a thread's products has
    # all of its columns in registers, of which 64 had 2.8 KiB spilled.
    plain = w.itemsize == 4 or old_card(w.device)
    block_k = 16 if plain else 64
    # twice as many products for each number loaded; 96 KiB in flight
    large = rows >= 128 and not plain
    block = 128 if large else 64
    block_m = min(block, max(16, triton.next_power_of_2(rows)))
    arguments = {"x": x, "out": out, "w": w, **tile_arguments(routed), "N": n, "K": k}
    arguments |= {"low": experts.start, "high": experts.stop}
    arguments |= {"x_stride": x.stride(0), "out_stride": out.stride(0)}
    constants: dict[str, Any] = {
        "WIDEN": w.dtype == torch.bfloat16 and INTERPRETED,
        "EVEN": k % block_k == 0,
    }
    constants |= {"BLOCK_N": block, "BLOCK_M": block_m, "BLOCK_K": block_k}
    grid = (-(-n // block), routed.tiles(block_m), 1)
    options = {"num_warps": 8 if large else 4, "num_stages": 3}
    return Launch(kernels.product_dense, grid, arguments, constants, options)


def multiply(x: Tensor, w: Tensor, out: Tensor) -> None:
    """``out = x @ w.T`` with x and w of one type; x is contiguous.

    For a float32 out, sums are not rounded if the library supports that (:func:`wide_sums`). For a
    16-bit out the library may round the sums of shares of K, as usual.
    """
    if library_rounds(x.dtype):
        plain_product(x, w, out).run()
        return
    if out.dtype == x.dtype:
        torch.mm(x, w.t(), out=out)
        return
    wide = wide_sums(x.device, x.dtype)
    for columns in runs(w.shape[0], columns_at_once(w.shape[0], x.shape[0])):
        part = w[columns].t()
        sums = torch.mm(x, part, out_dtype=torch.float32) if wide else torch.mm(x, part)
        out[:, columns] = sums


@cache
def wide_sums(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch returns sums of 16-bit products in float32: on GPUs from 2.8 on, on ROCm later
    (2.9 does not).
    """
    x = torch.zeros(16, 16, dtype=dtype, device=device)
    try:
        torch.mm(x, x, out_dtype=torch.float32)
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError):
        return False
    return True
