"""RMSNorm, with and without the residual addition: one pass over the rows.

``out = x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, in float32; must match
``reference/norm.py`` to 1e-6 of the row's largest value before it is rounded to the type of
``out``. The residual is float32. A program owns whole rows, so a row's result does not depend on
the others.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.launch import after_earlier, expect_on_device, run_kernel

#: A row is kept in registers: 16384 floats are 64 for each of 256 threads.
MAX_WIDTH = 16384
#: Values per program if rows are short (the norms of heads).
_TILE = 1024


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x,
    residual,
    weight,
    out,
    rows,
    inner,
    x_outer,
    x_inner,
    eps,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Rows of ``x`` at ``(row // inner) * x_outer + (row % inner) * x_inner``; the rest dense."""
    after_earlier()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = (row < rows)[:, None] & (column < WIDTH)[None, :]
    place = (row // inner) * x_outer + (row % inner) * x_inner
    values = tl.load(x + place[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    dense = row[:, None] * WIDTH + column[None, :]
    if ADD:
        values += tl.load(residual + dense, mask=mask, other=0.0)
        tl.store(residual + dense, values, mask=mask)
    mean = tl.sum(values * values, axis=1) / WIDTH
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    tl.store(out + dense, values * tl.rsqrt(mean + eps)[:, None] * scale[None, :], mask=mask)


def launch_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, out: Tensor
) -> None:
    """x ``[..., W]`` of at most 3 dimensions, the last contiguous; residual and out dense."""
    width = x.shape[-1]
    if x.dim() > 3 or x.stride(-1) != 1 or width > MAX_WIDTH:
        raise KernelError(
            f"rms_norm: expected rows of at most 3 dimensions and {MAX_WIDTH} features, "
            f"found {list(x.shape)} with strides {x.stride()}"
        )
    expect_on_device("rms_norm", x, residual, weight, out)
    rows = x.numel() // width
    inner = x.shape[1] if x.dim() == 3 else 1
    block = triton.next_power_of_2(width)
    per_program = max(1, _TILE // block)
    run_kernel(
        norm_kernel,
        (triton.cdiv(rows, per_program),),
        x,
        residual if residual is not None else out,
        weight.contiguous(),
        out,
        rows,
        inner,
        x.stride(0) if x.dim() > 1 else 0,
        x.stride(1) if x.dim() == 3 else 0,
        eps,
        WIDTH=width,
        BLOCK=block,
        ROWS=per_program,
        ADD=residual is not None,
        num_warps=8 if block > 2048 else 4,
    )


class RmsNorm:
    """See :meth:`sdk.kernels.ops.Ops.rms_norm`."""

    name = "gpu.rms_norm"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        launch_norm(x, None, weight, eps, out)


class AddRmsNorm:
    """See :meth:`sdk.kernels.ops.Ops.add_rms_norm`."""

    name = "gpu.add_rms_norm"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        if not residual.is_contiguous():
            raise KernelError(
                f"add_rms_norm: expected a contiguous residual, found strides {residual.stride()}"
            )
        launch_norm(x, residual, weight, eps, out)


OPS: dict[str, tuple[Any, ...]] = {"rms_norm": (RmsNorm(),), "add_rms_norm": (AddRmsNorm(),)}
