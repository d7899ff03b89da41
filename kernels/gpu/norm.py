"""Norms, with and without the residual addition, and with the result as codes for a product of
bytes: one pass over the rows.

:class:`sdk.kernels.operators.norm.Norm` says what is computed, in float32; must match
``reference/norm.py`` to 1e-6 of the row's largest value before it is rounded to the type of
``out``. The residual is float32. A program owns whole rows, so a row's result does not depend on
the others.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.byte_rows import STEP
from sdk.kernels.gpu.launch import TYPES, after_earlier, expect_on_device, run_kernel
from sdk.kernels.gpu.product_bytes import codes_of_row, scale_of_row
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.rounding import Rounded
from sdk.kernels.weights.layouts import ActivationScheme

#: A row is kept in registers: 16384 floats are 64 for each of 256 threads.
MAX_WIDTH = 16384
#: Values per program if rows are short (the norms of heads).
_TILE = 1024


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x, residual, weight, bias, out, scales, rows, inner, x_outer, x_inner, padded, eps, static,
    limit,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr,
    ROUND: tl.constexpr, STATIC: tl.constexpr, POWER: tl.constexpr, GROUP: tl.constexpr,
    VIA: tl.constexpr, CENTRED: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rows of ``x`` at ``(row // inner) * x_outer + (row % inner) * x_inner``; the rest dense.

    ``weight``, ``bias``: may be ``None``. ``HEADS``: row r has weights of its own, those of
    ``r % inner``.

    ``ROUND``: out is codes ``[rows, padded]`` with ``scales [BLOCK / GROUP, rows]``, those of
    ``round_rows`` and ``round_groups`` for the norm as ``VIA``.
    """
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
    if CENTRED:
        values -= (tl.sum(values, axis=1) / WIDTH)[:, None]
        values = tl.where(mask, values, 0.0)
    mean = tl.sum(values * values, axis=1) / WIDTH
    norm = values * tl.rsqrt(mean + eps)[:, None]
    if weight is not None:
        if HEADS:
            own = weight + (row % inner)[:, None] * WIDTH + column[None, :]
            norm *= tl.load(own, mask=mask, other=0.0)
        else:
            norm *= tl.load(weight + column, mask=column < WIDTH, other=0.0)[None, :]
    if bias is not None:
        norm += tl.load(bias + column, mask=column < WIDTH, other=0.0)[None, :]
    if ROUND:
        FLOAT: tl.constexpr = out.dtype.element_ty != tl.int8
        parts = tl.reshape(norm.to(VIA).to(tl.float32), (ROWS, BLOCK // GROUP, GROUP))
        peak, step = scale_of_row(tl.max(tl.abs(parts), 2), static, limit, FLOAT, STATIC, POWER)
        code = codes_of_row(parts, peak[:, :, None], step[:, :, None], FLOAT, STATIC)
        group = tl.arange(0, BLOCK // GROUP)
        at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        real = (row < rows)[:, None]
        to = out + row[:, None, None] * padded + at[None, :, :]
        tl.store(to, code, mask=real[:, :, None] & (at < padded)[None, :, :])
        poison = tl.sum(parts * 0.0, 2)  # NaN where something is not finite
        tl.store(
            scales + group[None, :] * rows + row[:, None],
            step + poison,
            mask=real & (group * GROUP < padded)[None, :],
        )
    else:
        tl.store(out + dense, norm, mask=mask)


def launch_norm(x: Tensor, residual: Tensor | None, norm: Norm, out: Tensor) -> None:
    """x ``[..., W]`` of at most 3 dimensions, the last contiguous; residual and out dense."""
    constants = {"ROUND": False, "STATIC": False, "POWER": False, "GROUP": 1, "VIA": tl.float32}
    _launch(x, residual, norm, out, out, 0.0, 0.0, constants)


def launch_rounded(
    x: Tensor,
    residual: Tensor | None,
    norm: Norm,
    out: Rounded,
    scheme: ActivationScheme,
    via: torch.dtype,
) -> None:
    """Codes of rows of x ``[T, W]``, whose norms are rounded to ``via`` first."""
    block = triton.next_power_of_2(x.shape[-1])
    constants = {
        "ROUND": True,
        "STATIC": scheme.static is not None,
        "POWER": scheme.rule == "power",
        "GROUP": min(block, STEP) if out.scales.shape[0] > 1 else block,
        "VIA": TYPES[via],
    }
    static = scheme.static or 0.0
    _launch(x, residual, norm, out.codes, out.scales, static, scheme.limit, constants)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    norm: Norm,
    out: Tensor,
    scales: Tensor,
    static: float,
    limit: float,
    constants: dict[str, Any],
) -> None:
    width = x.shape[-1]
    if x.dim() > 3 or x.stride(-1) != 1 or width > MAX_WIDTH:
        raise KernelError(
            f"norm: expected rows of at most 3 dimensions and {MAX_WIDTH} features, "
            f"found {list(x.shape)} with strides {x.stride()}"
        )
    weight, bias = norm.weight, norm.bias
    expect_on_device("norm", x, residual, weight, bias, out)
    rows = x.numel() // width
    block = triton.next_power_of_2(width)
    per_program = max(1, _TILE // block)
    run_kernel(
        norm_kernel,
        (triton.cdiv(rows, per_program),),
        x,
        residual if residual is not None else x,
        None if weight is None else weight.contiguous(),
        None if bias is None else bias.contiguous(),
        out,
        scales,
        rows,
        x.shape[1] if x.dim() == 3 else 1,
        x.stride(0) if x.dim() > 1 else 0,
        x.stride(1) if x.dim() == 3 else 0,
        out.shape[-1],
        norm.eps,
        static,
        limit,
        WIDTH=width,
        BLOCK=block,
        ROWS=per_program,
        ADD=residual is not None,
        CENTRED=norm.centred,
        HEADS=weight is not None and weight.dim() == 2,
        **constants,
        num_warps=8 if block > 2048 else 4,
    )


class Normalize:
    """See :meth:`sdk.kernels.operators.ops.Ops.norm`."""

    name = "gpu.norm"
    rounds = True

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, norm: Norm, out: Tensor) -> None:
        launch_norm(x, None, norm, out)

    def run_rounded(self, x: Tensor, norm: Norm, *given: Any) -> None:
        """See :meth:`sdk.kernels.operators.ops.Ops.add_norm_for` and :func:`launch_rounded`."""
        launch_rounded(x, None, norm, *given)


class AddNormalize:
    """See :meth:`sdk.kernels.operators.ops.Ops.add_norm`."""

    name = "gpu.add_norm"
    rounds = True

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, residual: Tensor, norm: Norm, out: Tensor) -> None:
        launch_norm(x, _dense(residual), norm, out)

    def run_rounded(self, x: Tensor, residual: Tensor, norm: Norm, *given: Any) -> None:
        """See :meth:`sdk.kernels.operators.ops.Ops.add_norm_for` and :func:`launch_rounded`."""
        launch_rounded(x, _dense(residual), norm, *given)


def _dense(residual: Tensor) -> Tensor:
    if not residual.is_contiguous():
        raise KernelError(
            f"add_norm: expected a contiguous residual, found strides {residual.stride()}"
        )
    return residual


OPS: dict[str, tuple[Any, ...]] = {"norm": (Normalize(),), "add_norm": (AddNormalize(),)}
