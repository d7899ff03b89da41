"""Adapters of products: ``native/low_rank.hpp``. The slots of a table stay where they are."""

from __future__ import annotations

import math
from ctypes import Array, addressof
from typing import Any

import torch
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.cpu.library import ELEMENT_TYPES, LowRankArgs, LowRankPart, LowRankSlot, OpKind
from sdk.kernels.cpu.runtime import NativeRuntime
from sdk.kernels.errors import KernelError
from sdk.kernels.low_rank import ALIGN, Factors, Shape, Update

#: Columns of a block of ``b``, and what rows of ``a`` are padded to.
BLOCK = 16


class LowRank:
    """See :class:`sdk.kernels.low_rank.LowRankKernel`."""

    name = "cpu.low_rank"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def table(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> CpuTable:
        return CpuTable(self._runtime, shape, dtype)


class CpuTable:
    """See :class:`sdk.kernels.low_rank.Table`."""

    def __init__(self, runtime: NativeRuntime, shape: Shape, dtype: torch.dtype) -> None:
        self._runtime = runtime
        self._shape = shape
        self._dtype = dtype
        self._slots: Array[Any] = (LowRankSlot * shape.slots)()
        #: What the pointers in the slots point to.
        self._kept: list[tuple[Update, Array[Any]] | None] = [None] * shape.slots

    def factor_bytes(self, rank: int, first: int, count: int) -> int:
        a, b = self._shapes(rank, first, count)
        return _aligned(math.prod(a) * self._dtype.itemsize) + math.prod(b) * self._dtype.itemsize

    def _shapes(self, rank: int, first: int, count: int) -> tuple[tuple[int, int], tuple[int, ...]]:
        """The shapes of packed factors: see LowRankPart in native/abi.hpp."""
        inputs = self._shape.in_features
        a = (inputs, rank) if self._shape.of_ids else (rank, _up(inputs) * BLOCK)
        return a, (_up(first + count) - first // BLOCK, rank, BLOCK)

    def place(self, factors: Factors, memory: Tensor) -> Factors:
        (rank, inputs), (count, _) = factors.a.shape, factors.b.shape
        a_shape, b_shape = self._shapes(rank, factors.first, count)
        dtype = self._dtype
        split = a_shape[0] * a_shape[1] * dtype.itemsize
        a = memory[:split].view(dtype).view(a_shape)
        end = _aligned(split) + math.prod(b_shape) * dtype.itemsize
        b = memory[_aligned(split) : end].view(dtype).view(b_shape)
        if self._shape.of_ids:
            a.copy_(factors.a.t())
        else:
            a[:, :inputs] = factors.a
            a[:, inputs:] = 0
        before = factors.first % BLOCK
        columns = factors.b.new_zeros(b_shape[0] * BLOCK, rank)
        columns[before : before + count] = factors.b
        b.copy_(columns.view(b_shape[0], BLOCK, rank).transpose(1, 2))
        return factors._replace(a=a, b=b)

    def write(self, slot: int, update: Update | None) -> None:
        if update is None:
            self._slots[slot] = LowRankSlot()
            self._kept[slot] = None
            return
        parts = (LowRankPart * len(update.factors))()
        ranks = 0
        for index, part in enumerate(update.factors):
            blocks, rank, _ = part.b.shape
            parts[index] = LowRankPart(
                part.a.data_ptr(),
                part.b.data_ptr(),
                rank,
                part.first // BLOCK,
                blocks,
                part.scale,
                ELEMENT_TYPES[part.a.dtype],
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


def _up(count: int) -> int:
    return -(-count // BLOCK)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
