"""Adapters of products on the GPU: two launches, whatever adapters the rows have.

The rows are not sorted. A program has 16 rows and one slot, and ends at once unless one of the rows
has that slot: the rows of a prompt have one slot, and a decode step has few programs. Factors are
found through addresses in device memory, so captured steps see adapters come and go. The numbers of
splits and programs depend only on shapes, and no program adds to what another wrote: a row gets the
same bits for any other rows.

Must match ``reference/low_rank.py`` to 1e-6, for 16-bit factors before rounding.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.launch import INTERPRETED, after_earlier, expect_on_device, run_kernel
from sdk.kernels.operators.low_rank import Factors, Shape, Update
from sdk.kernels.reference.low_rank import place_plain

#: Rows and ranks of a tile: the least that matrix instructions take.
_ROWS = _RANKS = 16
_DEPTH, _COLUMNS = 64, 64
#: Input features of a program of the first product. With 4096 features one program would read
#: 128 KiB of an adapter of rank 16, at the 50 to 100 GB/s of one multiprocessor.
_SPLIT = 1024
_FIELDS = tl.constexpr(5)  # of a part in the table: address of a, of b, rank, first, count


@triton.jit(do_not_specialize=["rows"])
def low_rank_down_kernel(
    x, low, slots, table, rows, width, most_rank, parts,
    K: tl.constexpr, FACTOR: tl.constexpr, WIDE: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, slots * parts, splits of K): ``low[split, t, part] = a x[t]``, float32."""
    after_earlier()
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot, part = tl.program_id(1) // parts, tl.program_id(1) % parts
    mine = tl.load(slots + row, mask=row < rows, other=-1) == slot
    entry = table + tl.program_id(1) * _FIELDS
    rank = tl.load(entry + 2).to(tl.int32)
    if (tl.sum(mine.to(tl.int32), 0) > 0) & (rank > 0):
        a = tl.load(entry).to(tl.pointer_type(FACTOR))
        begin = tl.program_id(2) * SPLIT
        out = low + (tl.program_id(2).to(tl.int64) * rows + row)[:, None] * width + part * most_rank
        for at in range(0, rank, BLOCK_R):
            j = at + tl.arange(0, BLOCK_R)
            sums = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
            for start in range(begin, min(begin + SPLIT, K), BLOCK_K):
                k = start + tl.arange(0, BLOCK_K)
                inside = (k < K) & (k < begin + SPLIT)
                each = tl.load(
                    x + row[:, None].to(tl.int64) * K + k[None, :],
                    mask=mine[:, None] & inside[None, :], other=0.0,
                )  # fmt: skip
                factor = tl.load(
                    a + j[None, :].to(tl.int64) * K + k[:, None],
                    mask=(j < rank)[None, :] & inside[:, None], other=0.0,
                )  # fmt: skip
                if WIDE:
                    sums = tl.dot(
                        each.to(tl.float32), factor.to(tl.float32), sums, input_precision="ieee"
                    )
                else:
                    sums = tl.dot(each, factor, sums)
            tl.store(out + j[None, :], sums, mask=mine[:, None] & (j < rank)[None, :])


@triton.jit(do_not_specialize=["rows"])
def low_rank_take_kernel(
    ids, low, slots, table, rows, width, most_rank, parts, inputs,
    FACTOR: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Grid (rows, parts), of an embedding: ``low[0, t, part]`` = row ids[t] of ``a.T``."""
    after_earlier()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, token = tl.load(slots + row), tl.load(ids + row)
    if (slot >= 0) & (token >= 0) & (token < inputs):
        entry = table + (slot * parts + part) * _FIELDS
        rank = tl.load(entry + 2).to(tl.int32)
        a = tl.load(entry).to(tl.pointer_type(FACTOR))
        j = tl.arange(0, BLOCK_R)
        values = tl.load(a + token * rank + j, mask=j < rank, other=0.0)
        out = low + row * width + part * most_rank
        tl.store(out + j, values.to(tl.float32), mask=j < rank)


@triton.jit(do_not_specialize=["rows"])
def low_rank_up_kernel(
    low, y, slots, table, scales, biases, rows, width, most_rank, parts, stride,
    N: tl.constexpr, SPLITS: tl.constexpr, FACTOR: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, slots, blocks of columns): ``y[t] += scale * b low[t] + bias``."""
    after_earlier()
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    slot = tl.program_id(1)
    mine = tl.load(slots + row, mask=row < rows, other=-1) == slot
    column = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    if tl.sum(mine.to(tl.int32), 0) > 0:
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for part in range(parts):
            entry = table + (slot * parts + part) * _FIELDS
            rank, first = tl.load(entry + 2).to(tl.int32), tl.load(entry + 3).to(tl.int32)
            count = tl.load(entry + 4).to(tl.int32)
            b = tl.load(entry + 1).to(tl.pointer_type(FACTOR))
            own = (column >= first) & (column < first + count)
            sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for at in range(0, rank, BLOCK_R):
                j = at + tl.arange(0, BLOCK_R)
                each = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
                for split in tl.static_range(SPLITS):
                    source = low + (row + split * rows)[:, None].to(tl.int64) * width
                    each += tl.load(
                        source + part * most_rank + j[None, :],
                        mask=mine[:, None] & (j < rank)[None, :], other=0.0,
                    )  # fmt: skip
                factor = tl.load(
                    b + (column - first)[None, :].to(tl.int64) * rank + j[:, None],
                    mask=own[None, :] & (j < rank)[:, None], other=0.0,
                )  # fmt: skip
                if WIDE:
                    sums = tl.dot(each, factor.to(tl.float32), sums, input_precision="ieee")
                else:  # the sum of two numbers of the factors' type has twice their bits
                    high = each.to(FACTOR)
                    sums = tl.dot(high, factor, sums)
                    sums = tl.dot((each - high.to(tl.float32)).to(FACTOR), factor, sums)
            total += sums * tl.load(scales + slot * parts + part)
        bias = tl.load(biases + slot).to(tl.pointer_type(tl.float32))
        inside = column < N
        if bias.to(tl.int64) != 0:
            total += tl.load(bias + column, mask=inside, other=0.0)[None, :]
        to = y + row[:, None].to(tl.int64) * stride + column[None, :]
        mask = mine[:, None] & inside[None, :]
        tl.store(to, tl.load(to, mask=mask, other=0.0).to(tl.float32) + total, mask=mask)


class LowRank:
    """See :class:`sdk.kernels.operators.low_rank.LowRankKernel`."""

    name = "gpu.low_rank"

    def reject(self, problem: Problem) -> str | None:
        return None

    def table(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> GpuTable:
        if dtype == torch.int8:
            raise KernelError("adapters in int8: expected a CPU, found a GPU")
        return GpuTable(shape, dtype, device)


class GpuTable:
    """See :class:`sdk.kernels.operators.low_rank.Table`."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._dtype = dtype
        places = (shape.slots, shape.parts)
        self._table = torch.zeros((*places, _FIELDS.value), dtype=torch.int64, device=device)
        self._biases = torch.zeros(shape.slots, dtype=torch.int64, device=device)
        self._scales = torch.ones(places, device=device)
        #: What the addresses in the table point to.
        self._kept: list[Update | None] = [None] * shape.slots

    def factor_bytes(self, rank: int, first: int, count: int) -> int:
        return rank * (self._shape.in_features + count) * self._dtype.itemsize

    def place(self, factors: Factors, memory: Tensor) -> Factors:
        if self._shape.of_ids:
            factors = factors._replace(a=factors.a.t())
        return place_plain(factors, memory)

    def write(self, slot: int, update: Update | None) -> None:
        rows = [[0] * _FIELDS.value for _ in range(self._shape.parts)]
        scales = [1.0] * self._shape.parts
        for index, part in enumerate(() if update is None else update.factors):
            (count, rank), first = part.b.shape, part.first
            rows[index] = [part.a.data_ptr(), part.b.data_ptr(), rank, first, count]
            scales[index] = part.scale
        self._table[slot] = torch.tensor(rows)
        self._scales[slot] = torch.tensor(scales)
        bias = None if update is None else update.bias
        self._biases[slot] = 0 if bias is None else bias.data_ptr()
        self._kept[slot] = update

    def add(self, x: Tensor, y: Tensor, slots: Tensor) -> None:
        expect_on_device("adapters", x, y, slots, self._table)
        rows, shape, dtype = x.shape[0], self._shape, self._dtype
        splits = 1 if shape.of_ids else triton.cdiv(shape.in_features, _SPLIT)
        width = shape.parts * shape.max_rank
        low = torch.empty(splits, rows, width, device=x.device)
        common: dict[str, Any] = {
            "low": low,
            "slots": slots,
            "table": self._table,
            "rows": rows,
            "width": width,
            "most_rank": shape.max_rank,
            "parts": shape.parts,
        }
        factor = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}.get(dtype, tl.float32)
        tiles = triton.cdiv(rows, _ROWS)
        if shape.of_ids:
            run_kernel(
                low_rank_take_kernel,
                (rows, shape.parts),
                ids=x,
                inputs=shape.in_features,
                FACTOR=factor,
                BLOCK_R=triton.next_power_of_2(shape.max_rank),
                **common,
            )
        else:
            run_kernel(
                low_rank_down_kernel,
                (tiles, shape.slots * shape.parts, splits),
                x=x,
                K=shape.in_features,
                FACTOR=factor,
                WIDE=INTERPRETED or x.dtype != dtype or dtype == torch.float16,
                SPLIT=_SPLIT,
                BLOCK_M=_ROWS,
                BLOCK_R=_RANKS,
                BLOCK_K=_DEPTH,
                **common,
            )
        run_kernel(
            low_rank_up_kernel,
            (tiles, shape.slots, triton.cdiv(shape.out_features, _COLUMNS)),
            y=y,
            scales=self._scales,
            biases=self._biases,
            stride=y.stride(0),
            N=shape.out_features,
            SPLITS=splits,
            FACTOR=factor,
            WIDE=INTERPRETED or dtype != torch.bfloat16,
            BLOCK_M=_ROWS,
            BLOCK_R=_RANKS,
            BLOCK_N=_COLUMNS,
            **common,
        )


OPS: dict[str, tuple[Any, ...]] = {"low_rank": (LowRank(),)}
