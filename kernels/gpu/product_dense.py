"""Products of experts whose weights are plain floats: ``out[r] = x[r] @ w[expert of r].T``.

The weights are the file's, or dequantized into scratch for a large prompt (``linear.py``). The
library multiplies single weights (``dense.py``), but for many experts it needs the rows of each on
the host, which a captured step cannot provide. Products and sums are float32; x is rounded to the
weights' type. Must match ``reference/linear.py`` to 1e-5 of the result's norm, for the rounded x.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdk.kernels.gpu.expert_tiles import expert_tile


@triton.jit(do_not_specialize=["low", "high"])
def product_dense(
    x, out, w, offsets, starts, active, sources, N, K, experts, low, high, x_stride, out_stride,
    WIDEN: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of ``out [R, N]``; ``offsets [E]``: elements from w to each expert's weight.

    Only of experts ``low`` to ``high - 1``: the others' weights are not there yet, or not any more.
    """
    expert, first, end = expert_tile(starts, active, experts, tl.program_id(1), BLOCK_M)
    if (first >= end) | (expert < low) | (expert >= high):
        return
    w += tl.multiple_of(tl.load(offsets + expert), 16)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = first + tl.arange(0, BLOCK_M)
    real = m < end
    source = m
    if sources is not None:
        source = tl.load(sources + m, mask=real, other=0)
    lane = tl.arange(0, BLOCK_K)
    where_w = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + lane[None, :]
    where_x = x + source.to(tl.int64)[None, :] * x_stride + lane[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = EVEN | (lane < K - k)
        values = tl.load(where_w + k, mask=inside[None, :], other=0.0)
        xs = tl.load(where_x + k, mask=inside[:, None] & real[None, :], other=0.0).to(values.dtype)
        if WIDEN:
            values, xs = values.to(tl.float32), xs.to(tl.float32)
        acc = tl.dot(values, xs, acc, input_precision="ieee")
    where = out + m[None, :].to(tl.int64) * out_stride + n[:, None]
    tl.store(where, acc, mask=real[None, :] & (n < N)[:, None])
