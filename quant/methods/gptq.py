"""GPTQ: columns that are not rounded yet compensate for each column's rounding error.

Frantar et al., "GPTQ" (2022). ``gram`` is ``sum x x^T`` over the inputs of the layer. With U the
upper Cholesky factor of its inverse, an error ``e`` in column i changes the columns after it by
``-e / U[i, i] * U[i, i:]``, the least-squares solution. Columns are visited by falling
``gram[i, i]`` ("act-order"): the most important ones while all others can still compensate.

Each group's range is narrowed to the part with the least error, columns weighted by ``gram[i, i]``.
With ``static`` groups, steps come from the original weights, so that a group stays a run of columns
that any kernel can read. Without, groups are formed in the order of visiting: somewhat better at
few bits, but the columns must be stored (and multiplied) in that order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.weights.layouts import BLOCK_TYPES, Affine, Blocks
from sdk.quant.errors import QuantizationError
from sdk.quant.methods.gguf_blocks import (
    ONE_SCALE,
    BlockSteps,
    block_values,
    one_scale_steps,
    pack_one_scale,
)
from sdk.quant.methods.integers import (
    Steps,
    as_affine,
    check_integers,
    group_of,
    grouped,
    joined_steps,
    narrower_steps,
)
from sdk.quant.methods.k_quants import k_steps, pack_k
from sdk.quant.permuted import Permuted
from sdk.quant.spec import QuantSpec

_BLOCK = 128
#: Number of weights whose steps are searched for at a time.
_CHUNK = 1 << 18
#: Ranges to try, as fractions of the whole range.
_SHRINKS = [1 - i / 50 for i in range(20)]
_DAMPING = 0.01
#: The largest damping to try if the Gram matrix is not positive definite.
_MOST_DAMPING = 10.0


def gptq(
    weight: Tensor, gram: Tensor, spec: QuantSpec, *, static: bool = True
) -> Affine | Permuted:
    """``weight``, float32 ``[N, K]``, quantized with the Gram matrix ``gram``, float32 ``[K, K]``.

    :raises QuantizationError: ``spec`` is not an integer type, or ``gram`` cannot be factored.
    """
    columns = weight.shape[1]
    group = group_of(spec, columns)
    if static or group >= columns:
        return gptq_rows([weight], gram, spec)
    check_integers(spec)
    visit = _Visit(gram)
    fitted = _Fitted(spec, group, gram.diagonal()[visit.order])
    codes = visit.codes(weight, fitted)[:, visit.order]
    layout = as_affine(codes, fitted.steps(), spec, columns)
    return Permuted(layout, visit.order.to(torch.int32))


def gptq_rows(parts: Iterable[Tensor], gram: Tensor, spec: QuantSpec) -> Affine:
    """:func:`gptq` with static groups, for a matrix that is given some rows at a time."""
    check_integers(spec)
    visit = _Visit(gram)
    codes: list[Tensor] = []
    steps: list[Steps] = []
    for part in parts:
        group = group_of(spec, part.shape[1])
        matters = grouped(gram.diagonal().unsqueeze(0), group)[0]
        found = _suited(grouped(visit.alive(part), group), spec, matters)
        of = visit.order // group
        lines = _Lines(found.scale, -found.zero * found.scale, of, 2**spec.bits - 1)
        codes.append(visit.codes(part, lines))
        steps.append(found)
    whole = torch.cat(codes)
    return as_affine(whole, joined_steps(steps), spec, whole.shape[1])


def gptq_blocks(weight: Tensor, gram: Tensor, kind: str) -> Blocks:
    """``weight``, float32 ``[N, K]``, in standard GGUF blocks.

    The steps of a block come from the original weights, with errors weighted by the diagonal.

    :raises QuantizationError: K is not a multiple of the block, or ``gram`` cannot be factored.
    """
    visit = _Visit(gram)
    steps = _block_steps(visit.alive(weight), kind, gram.diagonal())
    of = visit.order // BLOCK_TYPES[kind].group
    rows, columns = weight.shape
    scale, offset = (torch.from_numpy(a).view(rows, -1) for a in (steps.scale, steps.offset))
    grid: _Grid
    if steps.table is None:
        grid = _Lines(scale, offset, of, steps.top)
    else:
        grid = _Levels(scale, torch.from_numpy(steps.table), of)
    codes = visit.codes(weight, grid).contiguous().numpy().reshape(-1, BLOCK_TYPES[kind].elements)
    if kind in ONE_SCALE:
        data = pack_one_scale(kind, steps.stored, codes)
    else:
        data = pack_k(kind, steps, codes)
    return Blocks((rows, columns), kind, torch.from_numpy(data.reshape(rows, -1)))


def _block_steps(weight: Tensor, kind: str, diagonal: Tensor) -> BlockSteps:
    """The steps of all blocks, computed some rows at a time."""
    find = one_scale_steps if kind in ONE_SCALE else k_steps
    parts = []
    for part in torch.split(weight, max(_CHUNK // weight.shape[1], 1)):
        x, own = block_values(part, kind, diagonal.numpy())
        assert own is not None
        parts.append(find(x, kind, np.tile(own, (len(x) // len(own), 1))))
    stored, small, scale, offset = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("stored", "small", "scale", "offset")
    )
    return BlockSteps(stored, small, scale, offset, parts[0].top, parts[0].table)


def _suited(groups: Tensor, spec: QuantSpec, matters: Tensor) -> Steps:
    """Steps for groups ``[N, G, g]`` with column weights ``matters [G, g]``.

    SmolLM2's divergence at 4 bits is 0.090 with each group's whole range, 0.069 with its best part.
    """
    return narrower_steps(groups, spec, _SHRINKS, lambda off: off.square_().mul_(matters).sum(2))


def _factor(gram: Tensor, dead: Tensor, order: Tensor) -> Tensor:
    """U, upper triangular, with ``U^T U`` the inverse of the damped Gram matrix in ``order``."""
    damped = gram[order][:, order].clone()
    diagonal = damped.diagonal()
    diagonal.add_(dead[order].to(torch.float32))
    step = _DAMPING * float(diagonal.mean())
    damping = _DAMPING
    while damping <= _MOST_DAMPING:
        diagonal.add_(step)
        factor, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            inverse = torch.cholesky_inverse(factor)
            found: tuple[Tensor, Tensor] = torch.linalg.cholesky_ex(inverse, upper=True)
            if not int(found[1]) and bool(found[0].isfinite().all()):
                return found[0]
        step *= 2
        damping *= 2
    raise QuantizationError("the layer's calibration inputs are not finite, or all of them are 0")


class _Grid(Protocol):
    """The levels to which each visited column is rounded."""

    def nearest(self, column: int, ahead: Tensor) -> tuple[Tensor, Tensor]:
        """Codes and values, float32 ``[N]``, for the first row of ``ahead [columns left, N]``."""


class _Lines:
    """Levels ``scale * code + offset``, both ``[N, G]`` and known beforehand.

    ``of[i]`` is the group of the i-th visited column."""

    def __init__(self, scale: Tensor, offset: Tensor, of: Tensor, top: int) -> None:
        self._scale, self._offset = scale.t().contiguous(), offset.t().contiguous()
        self._inverse = torch.where(self._scale == 0, 0.0, 1 / self._scale)
        self._of: list[int] = of.tolist()
        self._top = top

    def nearest(self, column: int, ahead: Tensor) -> tuple[Tensor, Tensor]:
        group = self._of[column]
        offset = self._offset[group]
        code = ahead[0].sub(offset).mul_(self._inverse[group]).round_().clamp_(0, self._top)
        return code, code.mul(self._scale[group]).add_(offset)


class _Levels:
    """Levels ``scale * table[code]``, with ``scale [N, G]`` known beforehand and a rising table."""

    def __init__(self, scale: Tensor, table: Tensor, of: Tensor) -> None:
        self._scale = scale.t().contiguous()
        self._inverse = torch.where(self._scale == 0, 0.0, 1 / self._scale)
        self._of: list[int] = of.tolist()
        self._table, self._between = table, ((table[1:] + table[:-1]) / 2).numpy()

    def nearest(self, column: int, ahead: Tensor) -> tuple[Tensor, Tensor]:
        group = self._of[column]
        # numpy: torch.bucketize splits a column over threads, which wait when a core is busy
        found = np.searchsorted(self._between, (ahead[0] * self._inverse[group]).numpy())
        code = torch.from_numpy(found)
        return code, self._table[code].mul_(self._scale[group])


class _Fitted:
    """Steps fitted at the start of each group, to columns that already contain earlier errors."""

    def __init__(self, spec: QuantSpec, group: int, matters: Tensor) -> None:
        self.spec, self.group, self.matters = spec, group, matters
        self._found: list[Steps] = []

    def nearest(self, column: int, ahead: Tensor) -> tuple[Tensor, Tensor]:
        if column % self.group == 0:
            columns = ahead[: self.group].t().unsqueeze(1)
            matters = self.matters[column : column + self.group].unsqueeze(0)
            self._found.append(_suited(columns, self.spec, matters))
        scale, zero = self._found[-1].scale[:, 0], self._found[-1].zero[:, 0]
        code = torch.div(ahead[0], scale).round_().add_(zero).clamp_(0, 2**self.spec.bits - 1)
        return code, code.sub(zero).mul_(scale)

    def steps(self) -> Steps:
        return Steps(
            torch.cat([s.scale for s in self._found], 1),
            torch.cat([s.zero for s in self._found], 1),
        )


class _Visit:
    """The columns in the order of visiting, and how their errors are passed on.

    :raises QuantizationError: ``gram`` cannot be factored.
    """

    def __init__(self, gram: Tensor) -> None:
        diagonal = gram.diagonal()
        self.order = torch.argsort(diagonal, descending=True, stable=True)
        self._dead = diagonal == 0
        self._factor = _factor(gram, self._dead, self.order)

    def alive(self, weight: Tensor) -> Tensor:
        """``weight [N, K]`` with 0 in columns whose input is always 0."""
        return torch.where(self._dead, 0.0, weight)

    def codes(self, weight: Tensor, grid: _Grid) -> Tensor:
        """Codes, uint8 ``[N, K]``, with columns in their original order."""
        rows = self.alive(weight)[:, self.order].t().contiguous()
        back = torch.empty(rows.shape, dtype=torch.uint8)
        back[self.order] = _walk(rows, self._factor, grid)
        return back.t()


def _walk(rows: Tensor, factor: Tensor, grid: _Grid) -> Tensor:
    """Codes, uint8 ``[K, N]``, of columns in the order of visiting, stored as ``rows [K, N]``.

    ``rows`` is changed in place. A block of columns is finished before its errors reach later
    blocks, in one product. A group may extend beyond its block; :class:`_Fitted` then sees those
    columns without the current block's errors.
    """
    columns = rows.shape[0]
    pivots = factor.diagonal().tolist()
    codes = torch.empty(rows.shape, dtype=torch.uint8)
    for begin in range(0, columns, _BLOCK):
        end = min(begin + _BLOCK, columns)
        errors = torch.empty_like(rows[begin:end])
        for i in range(begin, end):
            code, value = grid.nearest(i, rows[i:])
            codes[i] = code.to(torch.uint8)
            error = torch.sub(rows[i], value).div_(pivots[i])
            errors[i - begin] = error
            rows[i + 1 : end].addr_(factor[i, i + 1 : end], error, alpha=-1)
        rows[end:].addmm_(factor[begin:end, end:].t(), errors, alpha=-1)
    return codes
