"""Packed weights with the kernels that multiply them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sdk.kernels.backend import Choice, Problem
from sdk.kernels.context import Context
from sdk.kernels.dataclass import dataclass
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.checks import expect, expect_floats
from sdk.kernels.operators.rounding import Rounding, Rows
from sdk.kernels.operators.routes import Routes
from sdk.kernels.weights.layouts import Layout


@dataclass(frozen=True, slots=True)
class BoundLinear:
    """One weight, packed by the kernel that was chosen for it."""

    choice: Choice
    packed: Any
    shape: tuple[int, int]
    context: Context
    problem: Problem

    def shared(self, context: Context) -> BoundLinear:
        """The same packed weight for another engine of this process, whose threads read it too."""
        kernels = (one for each in context.backends for one in each.implementations("linear"))
        own = next(kernel for kernel in kernels if kernel.name == self.choice.name)
        return replace(self, choice=replace(self.choice, implementation=own), context=context)

    @property
    def gates(self) -> bool:
        """See :class:`sdk.kernels.backend.LinearKernel`."""
        return bool(self.choice.implementation.gates)

    @property
    def rounding(self) -> Rounding | None:
        """See :class:`sdk.kernels.backend.LinearKernel`."""
        found: Rounding | None = self.choice.implementation.rounding(self.packed)
        return found

    def matmul(self, x: Rows, out: Tensor | None = None, activation: str = "") -> Tensor:
        """``x [M, K] -> [M, N]``, float32, or into ``out`` in the type of ``out``.

        The rows of ``out`` may be strided. ``activation``: only if the kernel :attr:`gates`; the
        result is ``[M, N / 2]``.
        """
        short = self.context.activations
        width = self.shape[0] // 2 if activation else self.shape[0]
        if isinstance(x, Tensor):
            expect_floats("linear x", x, short, None, self.shape[1])
            x = x.contiguous()
        elif self.rounding is None or x.width != self.shape[1]:
            raise KernelError(f"linear x: expected floats [M, {self.shape[1]}], found codes")
        if out is None:
            out = self.context.empty(x.shape[0], width)
        else:
            expect_floats("linear out", out, short, x.shape[0], width)
            if out.stride(1) != 1 or (out.shape[0] > 1 and out.stride(0) < out.shape[1]):
                raise KernelError(
                    f"linear out: expected contiguous, separate rows, found strides {out.stride()}"
                )
        if x.shape[0]:
            given = (activation,) if activation else ()
            self.choice.implementation.matmul(self.packed, x, out, *given)
        return out

    def rows(self, ids: Tensor, part: tuple[int, int] | None = None) -> Tensor:
        """``w[ids]``, dequantized exactly: ids int64 ``[T]`` -> float32 ``[T, K]``.

        ``part``: the first row of this weight in a matrix, and how many that has; ids are those of
        the matrix, and rows that are not here are zeros.
        """
        expect("rows ids", ids, torch.int64, None)
        count = self.shape[0] if part is None else part[1]
        # On a GPU this check would wait for the device; its kernels skip ids that are out of range.
        if ids.numel() and self.context.capture_pool is None and ids.is_cpu:
            low, high = int(ids.min()), int(ids.max())
            if low < 0 or high >= count:
                bad = low if low < 0 else high
                raise KernelError(f"rows: expected ids in 0..{count - 1}, found {bad}")
        kernel = self.choice.implementation
        if part is not None and not kernel.reads_parts:
            return rows_of_part(self.rows, self.shape[0], ids, part)
        out = self.context.empty(ids.shape[0], self.shape[1])
        if ids.numel():
            given = () if part is None else (part,)
            kernel.rows(self.packed, ids.contiguous(), out, *given)
        return out

    def layout(self) -> Layout:
        """The weight as it was before packing, bit for bit."""
        with self.context.layers.fetched(self.packed):
            layout: Layout = self.choice.implementation.unpack(self.packed)
        return layout

    @property
    def nbytes(self) -> int:
        return int(self.choice.implementation.nbytes(self.packed))


def rows_of_part(
    rows: Callable[[Tensor], Tensor], count: int, ids: Tensor, part: tuple[int, int]
) -> Tensor:
    """:meth:`BoundLinear.rows` with ``part``, where ``rows`` reads the ``count`` rows that are
    here."""
    here = (ids >= part[0]) & (ids < part[0] + count)
    return rows(torch.where(here, ids - part[0], 0)) * here.unsqueeze(1)


@dataclass(frozen=True, slots=True)
class BoundExperts:
    """The packed weights of all experts of a layer, of one shape and format."""

    implementation: Any
    packed: Any
    count: int
    shape: tuple[int, int]
    context: Context

    @property
    def reads_ahead(self) -> bool:
        """Whether some of them may be in a file, and are read before a product if it is expected:
        on a CPU."""
        return getattr(self.packed, "cached", None) is not None

    def expect(self, chosen: Tensor) -> None:
        """``chosen`` int32 ``[T, k]``: experts that will probably be needed soon. Only if it
        :attr:`reads_ahead`."""
        self.implementation.expect(self.packed, chosen)

    @property
    def gates(self) -> bool:
        """See :class:`sdk.kernels.backend.LinearKernel`."""
        return bool(self.implementation.gates)

    def matmul(self, x: Tensor, routes: Routes, *, by_token: bool, activation: str = "") -> Tensor:
        """``[R, N]`` in the order of the experts, from x ``[T, K]`` (``by_token``) or ``[R, K]``.

        The result has the activations' type (``Ops.activations``). ``activation``: see
        :meth:`BoundLinear.matmul`.
        """
        tokens, rows = routes.weights.shape[0], routes.tokens.shape[0]
        short = self.context.activations
        expect_floats("experts x", x, short, tokens if by_token else rows, self.shape[1])
        expect("experts starts", routes.starts, torch.int32, self.count + 1)
        width = self.shape[0] // 2 if activation else self.shape[0]
        out = self.context.empty(rows, width, dtype=short)
        if rows:
            given = (activation,) if activation else ()
            self.implementation.matmul_routed(
                self.packed, x.contiguous(), routes, by_token, out, *given
            )
        return out


@dataclass(frozen=True, slots=True)
class BoundHeads:
    """The packed weights of a layer's heads, of one shape, each of which multiplies its own part of
    a row. ``packed``: of all of them; ``None``: their kernel multiplies one at a time, which is for
    cards only."""

    heads: tuple[BoundLinear, ...]
    packed: Any
    context: Context

    def matmul(self, x: Tensor, out: Tensor) -> Tensor:
        """``out[t, h] = x[t, h] @ w[h].T`` of x ``[T, H, K]`` into out ``[T, H, N]``, both of which
        may be parts of wider heads; returns out."""
        first, short = self.heads[0], self.context.activations
        tokens, count = x.shape[0], len(self.heads)
        expect_floats("heads x", x, short, tokens, count, first.shape[1])
        expect_floats("heads out", out, short, tokens, count, first.shape[0])
        if x.stride(2) != 1 or out.stride(2) != 1:
            raise KernelError(
                f"heads: expected contiguous heads, found strides {x.stride()}, {out.stride()}"
            )
        if not tokens:
            return out
        if self.packed is not None:
            first.choice.implementation.matmul_heads(self.packed, x, out)
            return out
        for index, head in enumerate(self.heads):
            head.matmul(x[:, index], out[:, index])
        return out
