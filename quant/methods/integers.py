"""Integers in groups along K: where a group's steps lie, and rounding to them.

``w ~ scale * (code - zero)``, ``code`` and ``zero`` in ``0 .. 2^bits - 1``. A symmetric grid has
``zero = 2^(bits - 1)`` everywhere; its step spreads the largest magnitude over half the range,
``max|w| / ((2^bits - 1) / 2)``, so that one end is cut by half a step and all others gain. Scales
are rounded to float16 before a code is chosen, because that is what files hold: what is written is
what was optimized. Source: the quantizer of GPTQ (Frantar et al. 2022) as AutoGPTQ has it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sdk.kernels.layouts import Affine
from sdk.kernels.reference.decode import pack_codes
from sdk.quant.errors import QuantizationError
from sdk.quant.spec import QuantSpec

#: The smallest scale stored as a float16, where that still has 5 bits.
_SMALLEST = 2.0**-20
_LARGEST = 65504.0

#: Weights whose range is searched at a time, which bounds the memory for it.
_CHUNK = 1 << 20
#: Weights rounded at a time: what torch does in one thread and in its cache. Larger ones wait for
#: its other threads in every one of a dozen operations, and have temporaries that count in a load.
_ROUNDED_AT_ONCE = 1 << 15


@dataclass(frozen=True, slots=True)
class Steps:
    """``scale`` and ``zero`` float32 ``[N, G]``, the values that will be stored."""

    scale: Tensor
    zero: Tensor

    def codes(self, values: Tensor, bits: int) -> Tensor:
        """Grouped values ``[N, G, g]`` to the nearest codes, float32 of the same shape."""
        scale, zero = self.scale.unsqueeze(2), self.zero.unsqueeze(2)
        return torch.round(values / scale).add_(zero).clamp_(0, 2**bits - 1)

    def values(self, codes: Tensor) -> Tensor:
        """The inverse of :meth:`codes`."""
        return (codes - self.zero.unsqueeze(2)) * self.scale.unsqueeze(2)


def group_of(spec: QuantSpec, columns: int) -> int:
    """Columns that share a scale."""
    return min(spec.group or columns, columns)


def grouped(weight: Tensor, group: int) -> Tensor:
    """``[N, K] -> [N, G, g]``; a short last group repeats its last column, which moves no range."""
    short = -weight.shape[1] % group
    if short:
        weight = torch.cat((weight, weight[:, -1:].expand(-1, short)), 1)
    return weight.reshape(weight.shape[0], -1, group)


def fit_steps(groups: Tensor, spec: QuantSpec) -> Steps:
    """Steps that span every group of ``[N, G, g]`` from its smallest to its largest value."""
    low, high = _range(groups)
    return _steps(low, high, spec)


def narrower_steps(
    groups: Tensor, spec: QuantSpec, shrinks: Sequence[float], error: Callable[[Tensor], Tensor]
) -> Steps:
    """Steps over parts of each group's range, those for which what rounding changes matters least.

    ``error`` makes ``[n, G]`` of the changes ``[n, G, g]`` of some rows.
    """
    rows = max(_CHUNK // (groups.shape[1] * groups.shape[2]), 1)
    return joined_steps(
        [_narrower(part, spec, shrinks, error) for part in torch.split(groups, rows)]
    )


def _narrower(
    groups: Tensor, spec: QuantSpec, shrinks: Sequence[float], error: Callable[[Tensor], Tensor]
) -> Steps:
    low, high = _range(groups)
    best = _steps(low, high, spec)
    least = torch.full_like(best.scale, float("inf"))
    for shrink in shrinks:
        tried = _steps(low * shrink, high * shrink, spec)
        found = error(tried.values(tried.codes(groups, spec.bits)).sub_(groups))
        better = found < least
        least = torch.where(better, found, least)
        best = Steps(
            torch.where(better, tried.scale, best.scale), torch.where(better, tried.zero, best.zero)
        )
    return best


def _range(groups: Tensor) -> tuple[Tensor, Tensor]:
    return groups.amin(2).clamp_(max=0), groups.amax(2).clamp_(min=0)


def _steps(low: Tensor, high: Tensor, spec: QuantSpec) -> Steps:
    top = 2**spec.bits - 1
    if spec.symmetric:
        span = torch.maximum(high, -low) * 2
        zero = torch.full_like(span, float(2 ** (spec.bits - 1)))
    else:
        span = high - low
        zero = torch.round(-low / torch.where(span > 0, span / top, 1.0)).clamp_(0, top)
    scale = stored_scale(torch.where(span > 0, span / top, 1.0))
    return Steps(scale.to(torch.float32), zero)


def stored_scale(scale: Tensor) -> Tensor:
    """Scales in the type that files hold them in: float16, or float32 where that cannot.

    A scale too small to matter (its group is all but zero beside others) is raised to the smallest
    that keeps some bits.
    """
    if bool((scale > _LARGEST).any()):
        return scale.to(torch.float32)
    if float(scale.amax()) < 16 * _SMALLEST:  # a whole matrix of tiny values keeps its precision
        return scale.to(torch.float32)
    return scale.clamp(min=_SMALLEST).to(torch.float16)


def as_affine(codes: Tensor, steps: Steps, spec: QuantSpec, columns: int) -> Affine:
    """Codes ``[N, columns]`` (any type) and the steps of their groups as a layout."""
    return _as_affine(pack_codes(codes.to(torch.uint8), spec.bits), steps, spec, columns)


def _as_affine(packed: Tensor, steps: Steps, spec: QuantSpec, columns: int) -> Affine:
    scale = stored_scale(steps.scale)
    middle = 2 ** (spec.bits - 1)
    same = bool((steps.zero == middle).all())
    return Affine(
        (packed.shape[0], columns),
        spec.bits,
        group_of(spec, columns),
        packed,
        scale,
        zero=middle if same else 0,
        zeros=None if same else pack_codes(steps.zero.to(torch.uint8), spec.bits),
    )


def check_integers(spec: QuantSpec) -> None:
    """:raises QuantizationError: unless ``spec`` is of 2- to 8-bit integers."""
    if spec.kind != "int" or not 2 <= spec.bits <= 8:
        raise QuantizationError(f"expected integers of 2 to 8 bits, found {spec}")


def round_to_nearest(weight: Tensor, spec: QuantSpec) -> Affine:
    """Every value to the nearest step of its group: the baseline, and enough for 8 bits.

    ``weight`` float32 ``[N, K]``.

    :raises QuantizationError: ``spec`` is not of integers.
    """
    shape = weight.shape[0], weight.shape[1]
    return round_rows(lambda start, end: weight[start:end], shape, spec)


def round_rows(
    rows: Callable[[int, int], Tensor], shape: tuple[int, int], spec: QuantSpec
) -> Affine:
    """:func:`round_to_nearest` of a matrix ``shape``; ``rows(start, end)`` makes some rows of it.

    Asked for twice: what stores the scales depends on all of them. What stays is allocated first:
    among the float32 copies of some rows it kept glibc from joining what they gave back, and the
    peak of one and the same load was anything from 250 to 410 MiB.
    """
    check_integers(spec)
    count, columns = shape
    group = group_of(spec, columns)
    at_once = max(_ROUNDED_AT_ONCE // columns, 1)
    cuts = [(start, min(start + at_once, count)) for start in range(0, count, at_once)]
    low, high = torch.empty(2, count, -(-columns // group))
    for start, end in cuts:
        low[start:end], high[start:end] = _range(grouped(rows(start, end), group))
    steps = _steps(low, high, spec)
    packed = torch.empty(count, -(-columns * spec.bits // 8), dtype=torch.uint8)
    for start, end in cuts:
        part = Steps(steps.scale[start:end], steps.zero[start:end])
        codes = part.codes(grouped(rows(start, end), group), spec.bits).to(torch.uint8)
        packed[start:end] = pack_codes(codes.reshape(end - start, -1)[:, :columns], spec.bits)
    return _as_affine(packed, steps, spec, columns)


def joined_steps(parts: Sequence[Steps]) -> Steps:
    """The steps of rows one above the other."""
    return Steps(torch.cat([p.scale for p in parts]), torch.cat([p.zero for p in parts]))
