"""Packed weights with the kernels that multiply them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdk.kernels.backend import Choice, Problem
from sdk.kernels.checks import expect, expect_floats
from sdk.kernels.context import Context
from sdk.kernels.errors import KernelError
from sdk.kernels.layouts import Layout
from sdk.kernels.routes import Routes


@dataclass(frozen=True, slots=True)
class BoundLinear:
    """One weight, packed by the kernel that was chosen for it."""

    choice: Choice
    packed: Any
    shape: tuple[int, int]
    context: Context
    problem: Problem

    def matmul(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x [M, K] -> [M, N]``, float32, or into ``out`` in the type of ``out``.

        The rows of ``out`` may be strided.
        """
        short = self.context.activations
        expect_floats("linear x", x, short, None, self.shape[1])
        if out is None:
            out = self.context.empty(x.shape[0], self.shape[0])
        else:
            expect_floats("linear out", out, short, x.shape[0], self.shape[0])
            if out.stride(1) != 1 or (out.shape[0] > 1 and out.stride(0) < out.shape[1]):
                raise KernelError(
                    f"linear out: expected contiguous, separate rows, found strides {out.stride()}"
                )
        if x.shape[0]:
            self.choice.implementation.matmul(self.packed, x.contiguous(), out)
        return out

    def rows(self, ids: Tensor) -> Tensor:
        """``w[ids]``, dequantized exactly: ids int64 ``[T]`` -> float32 ``[T, K]``."""
        expect("rows ids", ids, torch.int64, None)
        # On a GPU this check would wait for the device; its kernels skip ids that are out of range.
        if ids.numel() and self.context.capture_pool is None and ids.is_cpu:
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= self.shape[0]:
                bad = low if low < 0 else high
                raise KernelError(f"rows: expected ids in 0..{self.shape[0] - 1}, found {bad}")
        out = self.context.empty(ids.shape[0], self.shape[1])
        if ids.numel():
            self.choice.implementation.rows(self.packed, ids.contiguous(), out)
        return out

    def layout(self) -> Layout:
        """The weight as it was before packing, bit for bit."""
        with self.context.layers.fetched(self.packed):
            layout: Layout = self.choice.implementation.unpack(self.packed)
        return layout

    @property
    def nbytes(self) -> int:
        return int(self.choice.implementation.nbytes(self.packed))


@dataclass(frozen=True, slots=True)
class BoundExperts:
    """The packed weights of all experts of a layer, of one shape and format."""

    implementation: Any
    packed: Any
    count: int
    shape: tuple[int, int]
    context: Context

    def matmul(self, x: Tensor, routes: Routes, *, by_token: bool) -> Tensor:
        """``[R, N]`` in the order of the experts, from x ``[T, K]`` (``by_token``) or ``[R, K]``.

        The result has the activations' type (``Ops.activations``).
        """
        tokens, rows = routes.weights.shape[0], routes.tokens.shape[0]
        short = self.context.activations
        expect_floats("experts x", x, short, tokens if by_token else rows, self.shape[1])
        expect("experts starts", routes.starts, torch.int32, self.count + 1)
        out = self.context.empty(rows, self.shape[0], dtype=short)
        if rows:
            self.implementation.matmul_routed(self.packed, x.contiguous(), routes, by_token, out)
        return out
