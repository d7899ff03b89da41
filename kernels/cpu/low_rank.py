"""Adapters of products: ``native/low_rank.hpp``. The slots of a table stay where they are."""

from __future__ import annotations

from ctypes import Array, addressof
from typing import Any

from sdk.kernels.backend import Problem
from sdk.kernels.cpu.library import ELEMENT_TYPES, LowRankArgs, LowRankPart, LowRankSlot, OpKind
from sdk.kernels.cpu.runtime import NativeRuntime
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch, type_name
from sdk.kernels.operators.low_rank import ALIGN, Factors, Shape, Update

#: Columns of a block of ``b``, and of a block of ``a``.
BLOCK = 16
#: Ranks of ``a`` that lie together: ``kLowUnit``.
UNIT = 8


class LowRank:
    """See :class:`sdk.kernels.operators.low_rank.LowRankKernel`."""

    name = "cpu.low_rank"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def table(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> CpuTable:
        return CpuTable(self._runtime, shape, dtype)


class CpuTable:
    """See :class:`sdk.kernels.operators.low_rank.Table`."""

    def __init__(self, runtime: NativeRuntime, shape: Shape, dtype: torch.dtype) -> None:
        self._runtime = runtime
        self._shape = shape
        self._dtype = dtype
        self._slots: Array[Any] = (LowRankSlot * shape.slots)()
        #: What the pointers in the slots point to.
        self._kept: list[tuple[Update, Array[Any]] | None] = [None] * shape.slots

    def factor_bytes(self, rank: int, first: int, count: int) -> int:
        return sum(_aligned(one) for one in self._sizes(rank, first, count))

    def _sizes(self, rank: int, first: int, count: int) -> tuple[int, ...]:
        """Bytes of a, b and the scales: see LowRankPart in native/abi.hpp."""
        width = self._shape.in_features if self._shape.of_ids else self._depth
        blocks = -(-(first + count) // BLOCK) - first // BLOCK
        if self._dtype == torch.int8:
            return rank * width, blocks * _even(rank) * BLOCK, 4 * rank
        size = self._dtype.itemsize
        return rank * width * size, blocks * rank * BLOCK * size

    @property
    def _depth(self) -> int:
        """Input features, padded to whole blocks of ``a``."""
        return -(-self._shape.in_features // self._block) * self._block

    @property
    def _block(self) -> int:
        return 2 * BLOCK if self._dtype == torch.int8 else BLOCK

    def place(self, factors: Factors, memory: Tensor) -> Factors:
        """``a`` becomes ``[rank, ...]`` and ``b`` ``[blocks, ...]``; within, values lie as the
        kernels read them."""
        rank, count = factors.a.shape[0], factors.b.shape[0]
        placed = []
        for size in self._sizes(rank, factors.first, count):
            own, memory = memory[:size], memory[_aligned(size) :]
            placed.append(own)
        a, b = placed[0].view(self._dtype), placed[1].view(self._dtype)
        if self._shape.of_ids:
            a.view(-1, rank).copy_(factors.a.t())
        else:
            self._place_units(factors.a, a)
        if factors.scales is None:
            blocks = b.view(-1, rank, BLOCK)
            _place_outputs(factors.b, factors.first, blocks.transpose(1, 2))
            return factors._replace(a=a.view(rank, -1), b=blocks)
        pairs = factors.b.new_zeros(count, _even(rank))
        pairs[:, :rank] = factors.b
        blocks = b.view(-1, pairs.shape[1] // 2, BLOCK, 2)
        halves = pairs.view(count, pairs.shape[1] // 2, 2)
        _place_outputs(halves, factors.first, blocks.transpose(1, 2))
        scales = placed[2].view(torch.float32).copy_(factors.scales)
        return factors._replace(a=a.view(rank, -1), b=blocks, scales=scales)

    def _place_units(self, a: Tensor, memory: Tensor) -> None:
        rank, inputs = a.shape
        padded = a.new_zeros(rank, self._depth)
        padded[:, :inputs] = a
        for begin in range(0, rank, UNIT):
            unit = padded[begin : begin + UNIT]
            blocks = unit.view(len(unit), -1, self._block).transpose(0, 1)
            own, memory = memory[: unit.numel()], memory[unit.numel() :]
            own.view(blocks.shape).copy_(blocks)

    def write(self, slot: int, update: Update | None) -> None:
        if update is None:
            self._slots[slot] = LowRankSlot()
            self._kept[slot] = None
            return
        parts = (LowRankPart * len(update.factors))()
        ranks = 0
        for index, part in enumerate(update.factors):
            rank, blocks = len(part.a), len(part.b)
            parts[index] = LowRankPart(
                part.a.data_ptr(),
                part.b.data_ptr(),
                None if part.scales is None else part.scales.data_ptr(),
                rank,
                part.first // BLOCK,
                blocks,
                part.scale,
                ELEMENT_TYPES[type_name(part.a.dtype)],
            )
            ranks += rank
        bias = None if update.bias is None else update.bias.data_ptr()
        self._slots[slot] = LowRankSlot(addressof(parts), bias, len(parts), ranks)
        self._kept[slot] = update, parts

    def add(self, x: Tensor, y: Tensor, slots: Tensor) -> None:
        if y.dtype != torch.float32 or y.stride(1) != 1:
            raise KernelError(f"adapter y: expected float32 rows, found {y.dtype} {y.stride()}")
        ids = self._shape.of_ids
        args = LowRankArgs(
            None if ids else x.data_ptr(),
            x.data_ptr() if ids else None,
            y.data_ptr(),
            slots.data_ptr(),
            addressof(self._slots),
            y.stride(0),
            len(self._slots),
            self._shape.in_features,
            self._shape.out_features,
        )
        self._runtime.run(OpKind.LOW_RANK, args, x.shape[0], "adapters")


def _place_outputs(rows: Tensor, first: int, blocks: Tensor) -> None:
    """Rows ``[count, ...]`` of outputs from ``first`` on into ``[blocks, BLOCK, ...]``."""
    padded = rows.new_zeros(blocks.shape[0] * BLOCK, *rows.shape[1:])
    begin = first % BLOCK
    padded[begin : begin + len(rows)] = rows
    blocks.copy_(padded.view(blocks.shape))


def _even(rank: int) -> int:
    return rank + rank % 2


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
