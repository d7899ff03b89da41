"""The small row-wise operators, gated activations, and the position of each token of a step.

Must match ``reference/elementwise.py`` and ``reference/norm.py``: to 1e-6 before the one rounding
of 16-bit results, copies exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import triton
import triton.language as tl
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.attention_work import list_work
from sdk.kernels.gpu.launch import after_earlier, expect_on_device, run_kernel
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.mlp_activations import ALWAYS_GATED, GATES, Activation

ACTIVATIONS = get_args(Activation)
MAPS = {"zeros": 0, "add": 1, "add_bias": 2, "scale": 3, "softcap": 4, "clamp": 5}
_BLOCK = 1024


@triton.jit
def _tanh(x):
    """By the exponential; its error is 1e-7."""
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def _expm1(x):
    """Of x <= 0. Between -0.35 and 0 by its series, whose ninth term is 1e-8 of the first."""
    p = 1.0 + x * (1.0 / 6.0) * (1.0 + x * (1.0 / 7.0) * (1.0 + x * (1.0 / 8.0)))
    p = 1.0 + x * (1.0 / 3.0) * (1.0 + x * (1.0 / 4.0) * (1.0 + x * (1.0 / 5.0) * p))
    near = x * (1.0 + x * 0.5 * p)
    return tl.where(x < -0.35, tl.exp(x) - 1.0, near)


@triton.jit
def xielu(x, alpha_p, alpha_n, beta, eps):
    """See reference/norm.py."""
    low = _expm1(tl.where(x > eps, eps, x)) - x
    return tl.where(x > 0.0, alpha_p * x * x, alpha_n * low) + beta * x


@triton.jit
def activate(gate, up, KIND: tl.constexpr):
    """``act(gate) * up`` in float32, one of :data:`ACTIVATIONS` but for ``xielu``."""
    if KIND == "silu":
        active = gate * tl.sigmoid(gate)
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = 0.5 * gate * (1.0 + _tanh(inner))
    elif KIND == "gelu":
        active = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    elif KIND == "relu":
        active = tl.where(gate < 0.0, 0.0, gate)
    elif KIND == "relu2":
        gate = tl.where(gate < 0.0, 0.0, gate)
        active = gate * gate
    else:
        tl.static_assert(KIND == "clamped_swiglu")
        gate = tl.where(gate > 7.0, 7.0, gate)
        active = gate * tl.sigmoid(1.702 * gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
    return active * up


@triton.jit
def activation_kernel(
    x, out, out_stride, alpha_p, alpha_n, beta, eps,
    WIDTH: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of columns): ``act(gate) * up`` of a row, gate then up; or ``act(x)``.

    The four numbers are of ``xielu``, else ``None``.
    """
    after_earlier()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH
    if GATED:
        gate = tl.load(x + row * 2 * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x + row * 2 * WIDTH + WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    else:
        gate = tl.load(x + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
        up = 1.0
    if KIND == "xielu":
        active = xielu(gate, alpha_p, alpha_n, beta, eps) * up
    else:
        active = activate(gate, up, KIND)
    tl.store(out + row * out_stride + column, active, mask=mask)


@triton.jit
def gate_kernel(
    x, gate, gate_stride,
    WIDTH: tl.constexpr, GATES: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of columns): runs of ``WIDTH`` numbers times the function of a gate, by
    its number in ``GATES`` of mlp_activations."""
    after_earlier()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < WIDTH * GATES
    factor = tl.load(gate + row * gate_stride + column // WIDTH, mask=mask, other=0.0)
    factor = factor.to(tl.float32)
    if KIND == 1:
        below = tl.exp(-tl.abs(factor))
        # log1p, which Triton does not have: exact where 1 + below has lost digits of it
        total = 1.0 + below
        lost = below / tl.where(total == 1.0, 1.0, total - 1.0)
        rest = tl.where(total == 1.0, below, tl.log(total) * lost)
        factor = tl.maximum(factor, 0.0, propagate_nan=tl.PropagateNan.ALL) + rest
    elif KIND == 2:
        factor = factor * tl.sigmoid(factor)
    elif KIND == 0:
        factor = tl.sigmoid(factor)
    place = x + row * WIDTH * GATES + column
    values = tl.load(place, mask=mask, other=0.0).to(tl.float32) * factor
    tl.store(place, values, mask=mask)


@triton.jit
def map_kernel(x, other, factor, count, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """One of :data:`MAPS` in place on ``count`` numbers in rows of ``width``."""
    after_earlier()
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    if KIND == 0:
        values = tl.zeros((BLOCK,), tl.float32)
    else:
        values = tl.load(x + index, mask=mask, other=0.0).to(tl.float32)
        if KIND == 1:
            values += tl.load(other + index, mask=mask, other=0.0).to(tl.float32)
        elif KIND == 2:
            values += tl.load(other + index % width, mask=mask, other=0.0)
        elif KIND == 3:
            values *= factor
        elif KIND == 4:
            values = factor * _tanh(values / factor)
        else:
            values = tl.where(values > factor, factor, tl.where(values < -factor, -factor, values))
    tl.store(x + index, values, mask=mask)


@triton.jit(do_not_specialize=["x_rows"])
def gather_kernel(
    x, index, out, width, x_rows, x_stride,
    BY_ROW: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows of out, blocks of columns): ``x[index]``, ``x[:, index]`` or its inverse."""
    after_earlier()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    if BY_ROW:
        source = tl.load(index + row).to(tl.int64)
        found = (source >= 0) & (source < x_rows)
        values = tl.load(x + source * x_stride + column, mask=mask & found, other=0.0)
        tl.store(out + row * width + column, values, mask=mask)
    else:
        place = tl.load(index + column, mask=mask, other=0)
        first, second = (column, place) if BACK else (place, column)
        values = tl.load(x + row * x_stride + first, mask=mask, other=0.0)
        tl.store(out + row * width + second, values, mask=mask)


@triton.jit(do_not_specialize=["size"])
def place_kernel(x, rows, index, width, size, stride, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (rows of x, blocks of columns): see ``PlaceRows``."""
    after_earlier()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(index + row).to(tl.int64)
    mask = (column < width) & (source >= 0) & (source < size)
    values = tl.load(rows + source * stride + column, mask=mask, other=0.0)
    target = x + row * width + column
    if ADD:
        values += tl.load(target, mask=mask, other=0.0)
    tl.store(target, values, mask=mask)


@triton.jit(do_not_specialize=["tokens", "requests"])
def places_kernel(
    query_start,
    context_len,
    table,
    positions,
    slots,
    tokens,
    requests,
    table_row,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each token's position, and the slot of its key and value.

    Tokens after the last request's, with which a captured step is filled up, have slot -1.
    """
    after_earlier()
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < tokens
    owner = tl.zeros((BLOCK,), tl.int32)  # the last request that begins at or before the token
    high = owner + requests
    span = requests
    while span > 0:
        middle = (owner + high) // 2
        after = tl.load(query_start + middle) <= token
        owner = tl.where(after, middle, owner)
        high = tl.where(after, high, middle)
        span = span // 2
    following = tl.load(query_start + owner + 1)
    real = token < following
    position = tl.where(real, tl.load(context_len + owner) - following + token, 0)
    place = table + owner.to(tl.int64) * table_row + position // PAGE
    page = tl.load(place, mask=mask & real, other=0)
    slot = page.to(tl.int64) * PAGE + position % PAGE
    tl.store(positions + token, position.to(tl.int64), mask=mask)
    tl.store(slots + token, tl.where(real, slot, -1), mask=mask)


class Activate:
    """See :meth:`sdk.kernels.operators.ops.Ops.gated_activation` and ``activation``."""

    def __init__(self, *, gated: bool) -> None:
        self._gated = gated
        self._kinds = [kind for kind in ACTIVATIONS if gated or kind not in ALWAYS_GATED]
        self.name = f"gpu.{'gated_' if gated else ''}activation"

    def reject(self, problem: Problem) -> str | None:
        if problem.format not in self._kinds:
            return f"activation {problem.format!r}: expected one of {', '.join(self._kinds)}"
        return None

    def run(self, x: Tensor, kind: str, out: Tensor, numbers: Sequence[float] = ()) -> None:
        expect_on_device("activation", x, out)
        if not x.is_contiguous():
            raise KernelError(f"activation: expected contiguous rows, found {x.stride()}")
        rows, width = out.shape
        run_kernel(
            activation_kernel,
            (rows, triton.cdiv(width, _BLOCK)),
            x,
            out,
            out.stride(0),
            *(numbers or (None,) * 4),
            WIDTH=width,
            KIND=kind,
            BLOCK=_BLOCK,
            GATED=self._gated,
        )


class Gate:
    """See :meth:`sdk.kernels.operators.ops.Ops.gate`."""

    name = "gpu.gate"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, gate: Tensor, kind: str) -> None:
        rows, gates = gate.shape
        if not x.is_contiguous() or x.shape[0] != rows or x.shape[1] % gates:
            raise KernelError(
                f"gate: expected {rows} contiguous rows of runs of {gates} gates, found "
                f"{list(x.shape)} with strides {x.stride()}"
            )
        gate = gate if gate.stride(1) == 1 else gate.contiguous()
        expect_on_device("gate", x, gate)
        run_kernel(
            gate_kernel,
            (rows, triton.cdiv(x.shape[1], _BLOCK)),
            x,
            gate,
            gate.stride(0),
            WIDTH=x.shape[1] // gates,
            GATES=gates,
            KIND=GATES.index(kind),
            BLOCK=_BLOCK,
        )


class Map:
    """One of ``Ops.zeros``, ``add``, ``add_bias``, ``scale``, ``softcap`` and ``clamp``."""

    def __init__(self, kind: str) -> None:
        self._what = kind
        self.name = f"gpu.{kind}"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, other: Tensor | None = None, factor: float = 0.0) -> None:
        if not x.is_contiguous():
            raise KernelError(f"{self._what}: expected contiguous rows, found {x.stride()}")
        other = None if other is None else other.contiguous()
        expect_on_device(self._what, x, other)
        run_kernel(
            map_kernel,
            (triton.cdiv(x.numel(), _BLOCK),),
            x,
            x if other is None else other,
            factor,
            x.numel(),
            x.shape[-1],
            KIND=MAPS[self._what],
            BLOCK=_BLOCK,
        )


class SelectRows:
    """See :meth:`sdk.kernels.operators.ops.Ops.select_rows`; rows that do not exist become
    zeros."""

    name = "gpu.select_rows"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, rows: Tensor, out: Tensor) -> None:
        gather("select_rows", x, rows, out, by_row=True)


class PlaceRows:
    """See :meth:`sdk.kernels.operators.ops.Ops.place_rows`; rows that do not exist are none."""

    name = "gpu.place_rows"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, rows: Tensor, index: Tensor, add: bool) -> None:
        expect_on_device("place_rows", x, rows, index)
        if not x.is_contiguous() or rows.stride(1) != 1:
            raise KernelError(
                f"place_rows: expected contiguous rows, found {x.stride()} and {rows.stride()}"
            )
        tokens, width = x.shape
        grid = (tokens, triton.cdiv(width, _BLOCK))
        sizes = width, rows.shape[0], rows.stride(0)
        run_kernel(place_kernel, grid, x, rows, index, *sizes, ADD=add, BLOCK=_BLOCK)


class TakeColumns:
    """See :meth:`sdk.kernels.operators.ops.Ops.take_columns`."""

    name = "gpu.take_columns"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, order: Tensor, back: bool, out: Tensor) -> None:
        gather("take_columns", x, order, out, back=back)


def gather(
    what: str, x: Tensor, index: Tensor, out: Tensor, by_row: bool = False, back: bool = False
) -> None:
    """``out = x[index]`` if ``by_row``, else ``x[:, index]`` or its inverse; ``what`` names it."""
    index = index.contiguous()
    x = x if x.stride(1) == 1 else x.contiguous()
    expect_on_device(what, x, index, out)
    rows, width = out.shape
    run_kernel(
        gather_kernel,
        (rows, triton.cdiv(width, _BLOCK)),
        x,
        index,
        out,
        width,
        x.shape[0],
        x.stride(0),
        BY_ROW=by_row,
        BACK=back,
        BLOCK=_BLOCK,
    )


class Places:
    """See :meth:`sdk.kernels.operators.ops.Ops.find_places`."""

    name = "gpu.find_places"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, batch: AttentionBatch) -> None:
        index = (batch.query_start, batch.context_len, batch.page_table)
        expect_on_device("find_places", *index, batch.positions, batch.slots)
        run_kernel(
            places_kernel,
            (triton.cdiv(batch.num_tokens, 256),),
            *index,
            batch.positions,
            batch.slots,
            batch.num_tokens,
            batch.num_requests,
            batch.page_table.stride(0),
            PAGE=batch.page_size,
            BLOCK=256,
        )
        if batch.work is not None:
            list_work(batch, batch.work, batch.splits)


OPS: dict[str, tuple[Any, ...]] = {
    "gated_activation": (Activate(gated=True),),
    "activation": (Activate(gated=False),),
    "gate": (Gate(),),
    **{kind: (Map(kind),) for kind in MAPS},
    "select_rows": (SelectRows(),),
    "place_rows": (PlaceRows(),),
    "take_columns": (TakeColumns(),),
    "find_places": (Places(),),
}
