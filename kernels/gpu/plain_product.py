"""Products with one weight of plain floats whose sums are float32 whatever the host has set.

torch's settings for the vendor's library belong to the whole process: with
``torch.set_float32_matmul_precision("high")`` a product of float32 numbers keeps 10 bits of each,
and with ``allow_fp16_accumulation`` sums of float16 products have 11 bits. A host may set both, at
any time and in any thread, so products that must not change are not given to the library.
Must match ``reference/linear.py`` to 1e-5 of the result's norm.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdk.kernels.gpu.launch import INTERPRETED, Launch, old_card


@triton.jit(do_not_specialize=["M"])
def plain_product_kernel(
    x, w, out, M, N, K, x_stride, w_stride, out_stride,
    WIDEN: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of ``out [M, N] = x [M, K] @ w [N, K].T``; K is added up from first to last."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    real = m < M
    lane = tl.arange(0, BLOCK_K)
    where_w = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * w_stride + lane[None, :]
    where_x = x + m.to(tl.int64)[None, :] * x_stride + lane[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = EVEN | (lane < K - k)
        values = tl.load(where_w + k, mask=inside[None, :], other=0.0)
        xs = tl.load(where_x + k, mask=inside[:, None] & real[None, :], other=0.0)
        if WIDEN:  # nothing if they are float32
            values, xs = values.to(tl.float32), xs.to(tl.float32)
        acc = tl.dot(values, xs, acc, input_precision="ieee")
    where = out + m[None, :].to(tl.int64) * out_stride + n[:, None]
    tl.store(where, acc, mask=real[None, :] & (n < N)[:, None])


def plain_product(x: Tensor, w: Tensor, out: Tensor) -> Launch:
    """``out [M, N] = x [M, K] @ w [N, K].T``; rows contiguous. x has w's type, or is float32 and is
    not rounded to it."""
    (rows, k), n = x.shape, w.shape[0]
    # plain units hold all columns of a thread's products in registers
    plain = x.itemsize == 4 or old_card(w.device)
    block_k = 16 if plain else 64
    most = 64 if x.dtype == w.dtype else 32  # conversions need registers: 64 spilled 24 bytes (9.0)
    block_m = min(most, max(16, triton.next_power_of_2(rows)))
    arguments: dict[str, Any] = {"x": x, "w": w, "out": out, "M": rows, "N": n, "K": k}
    arguments |= {"x_stride": x.stride(0), "w_stride": w.stride(0), "out_stride": out.stride(0)}
    constants: dict[str, Any] = {
        "WIDEN": x.dtype != w.dtype or (w.dtype == torch.bfloat16 and INTERPRETED),
        "EVEN": k % block_k == 0,
        "BLOCK_N": 64,
        "BLOCK_M": block_m,
        "BLOCK_K": block_k,
    }
    grid = (triton.cdiv(n, 64), triton.cdiv(rows, block_m), 1)
    options = {"num_warps": 4, "num_stages": 3}
    return Launch(plain_product_kernel, grid, arguments, constants, options)


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
