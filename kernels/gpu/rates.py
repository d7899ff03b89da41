"""The row-wise operators around recurrences: rates of a projection, and norms with a gate.

Must match ``reference/states.py`` to 1e-6 of a result's largest value before it is rounded to the
type of ``out``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.gpu.launch import after_earlier, expect_on_device, run_kernel
from sdk.kernels.operators.norm import Norm

_COLUMNS = 1024


@triton.jit
def rates_kernel(
    x, bias, factor, out, x_stride, low, high,
    WIDTH: tl.constexpr, RUN: tl.constexpr, KIND: tl.constexpr, LIMITED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of columns)."""
    after_earlier()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    values = tl.load(x + row * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    if bias is not None:
        values += tl.load(bias + column, mask=mask, other=0.0)
    if KIND == "softplus":
        below = tl.exp(-tl.abs(values))
        # log1p, which Triton does not have: exact where 1 + below has lost digits of it
        total = 1.0 + below
        lost = below / tl.where(total == 1.0, 1.0, total - 1.0)
        rest = tl.where(total == 1.0, below, tl.log(total) * lost)
        values = tl.maximum(values, 0.0, propagate_nan=tl.PropagateNan.ALL) + rest
    elif KIND == "tanh":
        values = 1.0 - 2.0 / (tl.exp(2.0 * values) + 1.0)
    else:
        values = tl.sigmoid(values)
    if LIMITED:  # a NaN stays NaN
        values = tl.where(values < low, low, tl.where(values > high, high, values))
    if factor is not None:
        values *= tl.load(factor + column // RUN, mask=mask, other=0.0)
    tl.store(out + row * WIDTH + column, values, mask=mask)


@triton.jit
def gated_norm_kernel(
    x, gate, weight, out, x_token, x_head, gate_token, gate_head, eps,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SILU: tl.constexpr,
    FIRST: tl.constexpr, BY_HEAD: tl.constexpr,
):  # fmt: skip
    """Grid (rows of heads)."""
    after_earlier()
    row = tl.program_id(0).to(tl.int64)
    token, head = row // HEADS, row % HEADS
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    values = tl.load(x + token * x_token + head * x_head + column, mask=mask, other=0.0)
    factor = tl.load(gate + token * gate_token + head * gate_head + column, mask=mask, other=0.0)
    values, factor = values.to(tl.float32), factor.to(tl.float32)
    if SILU:
        factor = factor * tl.sigmoid(factor)
    else:
        factor = tl.sigmoid(factor)
    if FIRST:
        values *= factor
    values *= tl.rsqrt(tl.sum(tl.where(mask, values * values, 0.0), 0) / WIDTH + eps)
    if weight is not None:
        if BY_HEAD:
            values *= tl.load(weight + head * WIDTH + column, mask=mask, other=0.0)
        else:
            values *= tl.load(weight + column, mask=mask, other=0.0)
    if not FIRST:
        values *= factor
    tl.store(out + row * WIDTH + column, values, mask=mask)


class Rates:
    """See :meth:`sdk.kernels.operators.state_ops.StateOps.rates`."""

    name = "gpu.rates"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(
        self,
        x: Tensor,
        kind: str,
        bias: Tensor | None,
        factor: Tensor | None,
        limits: tuple[float, float] | None,
        out: Tensor,
    ) -> None:
        bias = None if bias is None else bias.contiguous()
        factor = None if factor is None else factor.contiguous()
        expect_on_device("rates", x, bias, factor, out)
        rows, width = x.shape
        block = min(triton.next_power_of_2(width), _COLUMNS)
        low, high = limits or (0.0, 0.0)
        run_kernel(
            rates_kernel,
            (rows, triton.cdiv(width, block)),
            x,
            bias,
            factor,
            out,
            x.stride(0),
            low,
            high,
            WIDTH=width,
            RUN=width if factor is None else width // factor.shape[0],
            KIND=kind,
            LIMITED=limits is not None,
            BLOCK=block,
        )


class GatedNorm:
    """See :meth:`sdk.kernels.operators.state_ops.StateOps.gated_norm`."""

    name = "gpu.gated_norm"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, gate: Tensor, norm: Norm, kind: str, first: bool, out: Tensor) -> None:
        weight = None if norm.weight is None else norm.weight.contiguous()
        expect_on_device("gated_norm", x, gate, weight, out)
        tokens, heads, width = x.shape
        run_kernel(
            gated_norm_kernel,
            (tokens * heads,),
            x,
            gate,
            weight,
            out,
            x.stride(0),
            x.stride(1),
            gate.stride(0),
            gate.stride(1),
            norm.eps,
            HEADS=heads,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            SILU=kind == "silu",
            FIRST=first,
            BY_HEAD=weight is not None and weight.dim() == 2,
        )
