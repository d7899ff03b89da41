"""Products whose K is shared among programs ("split K"), and the store at the end of a product.

Each of the ``split`` programs of a tile writes the float32 sums of its share of K to ``parts`` and
adds one to the tile's counter. The program that comes last adds all shares in their order. So a
product is one launch, and its result does not depend on which program is last. It sets the counter
back to 0 for the next product: counters belong to one engine, whose kernels run one after another.

With an ``ACTIVATION`` a weight has the rows of gate, then those of up. A tile has as many rows of
both, and ``act(gate) * up`` is stored: neither goes through memory.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.elementwise import activate
from sdk.kernels.gpu.scratch import COUNTERS


@triton.jit
def tile_rows(block, N, BLOCK_N: tl.constexpr, ACTIVATION: tl.constexpr, WARPS: tl.constexpr):
    """The rows ``[BLOCK_N]`` of the weight in its ``block``-th tile, and whether they exist.

    ``WARPS``: in the order in which so many warps load words (:func:`values.woven`): a warp has 8
    of each ``8 * WARPS`` rows, and they become 16 neighbours, which its matrix instructions need.
    """
    index = tl.arange(0, BLOCK_N)
    if WARPS > 0:
        PASSES: tl.constexpr = BLOCK_N // (8 * WARPS)
        index = index // 8 % WARPS * (8 * PASSES) + index // (8 * WARPS) * 8 + index % 8
    if ACTIVATION == "":
        n = block * BLOCK_N + index
        real = n < N
    else:  # the first half of gate, the second of up
        HALF: tl.constexpr = BLOCK_N // 2
        column = block * HALF + index % HALF
        real = column < N // 2
        n = column + index // HALF * (N // 2)
    return tl.minimum(n, N - 1), real


@triton.jit
def store_tile(
    acc, block, rows, real, m, wanted, out, out_stride, parts, part_stride, counters, tile, share,
    split, N,
    SHARED: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """``out[m, n]`` of the tile ``acc [BLOCK_N, BLOCK_M]``: ``block``, ``rows`` and ``real`` as in
    :func:`tile_rows`, and tokens ``m`` where ``wanted``.

    With ``SHARED``, acc is share number ``share`` of ``split``, and the last program stores.
    """
    mask = real[:, None] & wanted[None, :]
    last = True
    if SHARED:
        place = m[None, :].to(tl.int64) * N + rows[:, None]
        tl.store(parts + share * part_stride + place, acc, mask=mask)
        tl.debug_barrier()  # the stores of all threads come before the addition of one
        last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == split - 1
        if last:
            tl.store(counters + tile, 0)
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for i in range(split):  # ".cg": not from the cache of one multiprocessor
                given = parts + i * part_stride + place
                acc += tl.load(given, mask=mask, other=0.0, cache_modifier=".cg")
    if last:
        if ACTIVATION == "":
            to = out + m[None, :].to(tl.int64) * out_stride + rows[:, None]
            tl.store(to, acc.to(out.dtype.element_ty), mask=mask)
        else:
            HALF: tl.constexpr = BLOCK_N // 2
            halves = tl.permute(tl.reshape(acc, (2, HALF, BLOCK_M)), (1, 2, 0))
            gate, up = tl.split(halves)
            column = block * HALF + tl.arange(0, HALF)
            to = out + m[None, :].to(tl.int64) * out_stride + column[:, None]
            values = activate(gate, up, ACTIVATION).to(out.dtype.element_ty)
            tl.store(to, values, mask=(column < N // 2)[:, None] & wanted[None, :])


class Sharing:
    """The memory of products whose K is shared; its counters belong to one engine."""

    def __init__(self) -> None:
        self._counters: dict[torch.device, Tensor] = {}

    def prepare(self, device: torch.device) -> None:
        """Create the counters, before steps are recorded."""
        if device not in self._counters:
            self._counters[device] = torch.zeros(COUNTERS, dtype=torch.int32, device=device)

    def arguments(
        self, split: int, rows: int, n: int, tiles: int, device: torch.device
    ) -> dict[str, Any]:
        """What :func:`store_tile` needs for a product ``[rows, n]`` of so many ``tiles``, each of
        which ``split`` programs share."""
        if split == 1:
            return {"parts": None, "part_stride": 0, "counters": None, "split": 1}
        if tiles > COUNTERS:
            raise KernelError(f"shares of K: expected at most {COUNTERS} tiles, found {tiles}")
        self.prepare(device)
        parts = torch.empty(split, rows, n, device=device)
        counters = self._counters[device]
        return {"parts": parts, "part_stride": rows * n, "counters": counters, "split": split}
