"""Products whose weights are plain floats: ``out = x @ w.T``, of one weight or of experts.

The weights are the file's, or dequantized into scratch for a large prompt (``linear.py``). The
vendor's library multiplies most single weights (``dense.py``). For experts it needs the rows of
each on the host, which a captured step cannot provide. Products and sums are float32, and K is
added up from first to last. Must match ``reference/linear.py`` to 1e-5 of the result's norm.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdk.kernels.gpu.expert_tiles import expert_tile
from sdk.kernels.gpu.launch import after_earlier


@triton.jit(do_not_specialize=["M", "tiles_at", "low", "high"])
def product_dense(
    x, w, out, offsets, starts, tiles, sources, M, N, K, tiles_at, low, high,
    x_stride, w_stride, out_stride,
    ROUTED: tl.constexpr, ROUND: tl.constexpr, WIDEN: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of ``out [M, N] = x [M, K] @ w [N, K].T``; x is rounded to w's type if ``ROUND``.

    Grid (tiles of tokens, tiles of rows). ``WIDEN``: both factors become float32.
    ``ROUTED``: rows of experts ``low`` to ``high - 1`` only, because the others' weights are not
    there yet, or not any more; ``offsets [E]``: elements from w to each expert's weight.
    """
    after_earlier()
    first = tl.program_id(0) * BLOCK_M
    end = M
    if ROUTED:
        expert, first, end = expert_tile(starts, tiles, tiles_at, tl.program_id(0))
        if (first >= end) | (expert < low) | (expert >= high):
            return
        w += tl.multiple_of(tl.load(offsets + expert), 16)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = first + tl.arange(0, BLOCK_M)
    real = m < end
    source = m
    if sources is not None:
        source = tl.load(sources + m, mask=real, other=0)
    lane = tl.arange(0, BLOCK_K)
    where_w = w + tl.minimum(n, N - 1).to(tl.int64)[:, None] * w_stride + lane[None, :]
    where_x = x + source.to(tl.int64)[None, :] * x_stride + lane[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in range(0, K, BLOCK_K):
        inside = EVEN | (lane < K - k)
        values = tl.load(where_w + k, mask=inside[None, :], other=0.0)
        xs = tl.load(where_x + k, mask=inside[:, None] & real[None, :], other=0.0)
        if ROUND:
            xs = xs.to(values.dtype)
        if WIDEN:
            values, xs = values.to(tl.float32), xs.to(tl.float32)
        acc = tl.dot(values, xs, acc, input_precision="ieee")
    where = out + m[None, :].to(tl.int64) * out_stride + n[:, None]
    tl.store(where, acc, mask=real[None, :] & (n < N)[:, None])
