"""Products with float weights: by the vendor's library, or by a kernel of ours where the library
might round, or where rows are of experts.

torch's settings for the library belong to the whole process: with
``torch.set_float32_matmul_precision("high")`` a product of float32 numbers keeps 10 bits of each,
and with ``allow_fp16_accumulation`` sums of float16 products have 11 bits. A host may set both, at
any time and in any thread, so products that must not change are not given to the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.gpu import product_dense as kernels
from sdk.kernels.gpu.elementwise import gather
from sdk.kernels.gpu.expert_tiles import Experts, Routed, offsets_of, tile_arguments
from sdk.kernels.gpu.launch import INTERPRETED, Launch, expect_on_device, old_card
from sdk.kernels.gpu.scratch import columns_at_once, runs
from sdk.kernels.operators.routes import Routes
from sdk.kernels.weights.layouts import Dense, Layout

#: Alignment in bytes of the weights of experts: 16 elements of 4 bytes.
_ALIGNED = 64
_TYPES = ("float32", "float16", "bfloat16")


class DenseLinear:
    """See :class:`sdk.kernels.backend.LinearKernel`.

    x is rounded to the weight's type. With ``fixed`` everything is rejected, because the library's
    order of additions depends on the number of tokens. ``exact``: for weights of 16 bits and
    ``compute="exact"``; x is not rounded, and K is added up in one order.
    """

    reads_parts = False
    packs_pieces = False
    gates = False

    def __init__(self, *, exact: bool = False, fixed: bool = False) -> None:
        self._exact, self._fixed = exact, fixed
        self.name = "gpu.dense_exact" if exact else "gpu.dense"

    def reject(self, problem: Problem) -> str | None:
        types = _TYPES[1:] if self._exact else _TYPES
        if problem.layout != "dense" or problem.format not in types:
            return f"{problem.format} {problem.layout}: expected dense {', '.join(types)}"
        if self._exact:
            return None if problem.compute == "exact" else "compute is not exact"
        if self._fixed:
            return "the library's order of additions depends on the batch"
        if problem.compute == "exact" and problem.format != "float32":
            return f"rounds activations to {problem.format}, but compute is exact"
        return None

    def rounding(self, packed: object) -> None:
        """Rows are floats."""

    def pack(self, layout: Layout) -> Dense:
        assert isinstance(layout, Dense)
        return layout

    def unpack(self, packed: Dense) -> Layout:
        return packed

    def nbytes(self, packed: Dense) -> int:
        return packed.nbytes

    def matmul(self, packed: Dense, x: Tensor, out: Tensor) -> None:
        if self._exact:
            product_dense(packed.values, x, out, exact=True).run()
        else:
            multiply(x.to(packed.values.dtype), packed.values, out)

    def rows(self, packed: Dense, ids: Tensor, out: Tensor) -> None:
        gather("rows", packed.values, ids, out, by_row=True)

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
        routed = Routed(group.offsets, routes, routes.tokens if by_token else None)
        experts = range(group.count)
        product_dense(group.first.values, x, out, routed, experts, exact=self._exact).run()


def product_dense(
    w: Tensor,
    x: Tensor,
    out: Tensor,
    routed: Routed | None = None,
    experts: range = range(0),
    *,
    exact: bool = False,
) -> Launch:
    """``out [M, N] = x [M, K] @ w [N, K].T``; rows contiguous. x is rounded to w's type unless
    ``exact``.

    ``routed``: the rows of ``experts`` instead; its offsets count from w.
    """
    n, k = w.shape
    count = out.shape[0]
    rows = count if routed is None else -(-count // routed.experts)
    # Plain units multiply float32, and every number of an old card: each of a thread's products has
    # all of its columns in registers, of which 64 had 2.8 KiB spilled.
    plain = exact or w.itemsize == 4 or old_card(w.device)
    block_k = 16 if plain else 64
    # twice as many products for each number loaded; 96 KiB in flight
    large = rows >= 128 and not plain
    block = 128 if large else 64
    most = 32 if exact else block  # conversions need registers: 64 spilled 24 bytes (9.0)
    block_m = min(most, max(16, triton.next_power_of_2(rows)))
    arguments: dict[str, Any] = {"x": x, "w": w, "out": out, **tile_arguments(routed, block_m)}
    arguments |= {"M": count, "N": n, "K": k, "low": experts.start, "high": experts.stop}
    arguments |= {"x_stride": x.stride(0), "w_stride": w.stride(0), "out_stride": out.stride(0)}
    constants: dict[str, Any] = {
        "ROUTED": routed is not None,
        "ROUND": not exact,
        "WIDEN": exact or (w.dtype == torch.bfloat16 and INTERPRETED),
        "EVEN": k % block_k == 0,
    }
    constants |= {"BLOCK_N": block, "BLOCK_M": block_m, "BLOCK_K": block_k}
    tiles = -(-count // block_m) if routed is None else routed.tiles(block_m)
    options = {"num_warps": 8 if large else 4, "num_stages": 3}
    return Launch(kernels.product_dense, (tiles, -(-n // block), 1), arguments, constants, options)


def multiply(x: Tensor, w: Tensor, out: Tensor) -> None:
    """``out = x @ w.T`` with x and w of one type; x is contiguous.

    For a float32 out, sums are not rounded if the library supports that (:func:`wide_sums`). For a
    16-bit out the library may round the sums of shares of K, as usual.
    """
    if library_rounds(x.dtype):
        product_dense(w, x, out).run()
    elif out.dtype == x.dtype:
        torch.mm(x, w.t(), out=out)
    elif wide_sums(x.device, x.dtype):
        torch.mm(x, w.t(), out_dtype=torch.float32, out=out)
    else:
        for columns in runs(w.shape[0], columns_at_once(w.shape[0], x.shape[0])):
            out[:, columns] = torch.mm(x, w[columns].t())


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


def library_rounds(dtype: torch.dtype) -> bool:
    """Whether the vendor's library may now, or at any time, round products or sums of this type
    to fewer bits than float32 has.

    Sums of shares of K with 16 bits (``allow_bf16_reduced_precision_reduction``, on by default)
    are rounded only in results of 16 bits, which are rounded anyway.
    """
    if dtype == torch.float32:
        return True  # asked for at each product, it could change before the library begins
    if dtype == torch.float16:
        return bool(getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False))
    return False
