"""Integers in groups along K: scales, zero points and rounding to nearest.

``w ~ scale * (code - zero)`` with ``code`` and ``zero`` in ``0 .. 2^bits - 1``. A symmetric grid
has ``zero = 2^(bits - 1)`` everywhere. Its step spreads the largest magnitude over half the range,
``max|w| / ((2^bits - 1) / 2)``: one end is clipped by half a step, and all other values gain.
Scales are rounded to float16, the type in files, before codes are chosen, so that codes are optimal
for the stored scales. Source: GPTQ's quantizer (Frantar et al. 2022) as in AutoGPTQ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.reference.decode import pack_codes
from sdk.kernels.weights.layouts import Affine
from sdk.quant.errors import QuantizationError
from sdk.quant.spec import QuantSpec

#: The smallest scale stored as float16; there float16 still has 5 bits.
SMALLEST_SCALE = 2.0**-20
LARGEST_SCALE = 65504.0
#: If all scales of a matrix are below, they stay float32.
LEAST_OF_HALVES = 16 * SMALLEST_SCALE

#: Weights whose range is searched at a time, to bound memory.
_CHUNK = 1 << 20
#: Weights rounded at a time: small enough that torch uses one thread and stays in its cache. Larger
#: tensors wait for other threads in each of a dozen operations, and raise a load's peak memory.
_ROUNDED_AT_ONCE = 1 << 15


@dataclass(frozen=True, slots=True)
class Steps:
    """``scale`` and ``zero``, float32 ``[N, G]``, with the values that will be stored."""

    scale: Tensor
    zero: Tensor

    def codes(self, values: Tensor, bits: int) -> Tensor:
        """The nearest codes of grouped values ``[N, G, g]``, float32 of the same shape."""
        scale, zero = self.scale.unsqueeze(2), self.zero.unsqueeze(2)
        return torch.round(values / scale).add_(zero).clamp_(0, 2**bits - 1)

    def values(self, codes: Tensor) -> Tensor:
        """The values of codes: the inverse of :meth:`codes`."""
        return (codes - self.zero.unsqueeze(2)) * self.scale.unsqueeze(2)


def group_of(spec: QuantSpec, columns: int) -> int:
    """The number of columns that share a scale."""
    return min(spec.group or columns, columns)


def grouped(weight: Tensor, group: int) -> Tensor:
    """``[N, K] -> [N, G, g]``; a short last group repeats its last column to keep its range."""
    short = -weight.shape[1] % group
    if short:
        weight = torch.cat((weight, weight[:, -1:].expand(-1, short)), 1)
    return weight.reshape(weight.shape[0], -1, group)


def fit_steps(groups: Tensor, spec: QuantSpec) -> Steps:
    """Steps that span each group of ``[N, G, g]`` from its smallest to its largest value."""
    low, high = _range(groups)
    return _steps(low, high, spec)


def narrower_steps(
    groups: Tensor, spec: QuantSpec, shrinks: Sequence[float], error: Callable[[Tensor], Tensor]
) -> Steps:
    """Steps over the part of each group's range that gives the least rounding error.

    ``error`` computes errors ``[n, G]`` from the changes ``[n, G, g]`` of some rows.
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
        zero += 0.0  # no negative zeros, which HQQ would store
    scale = stored_scale(torch.where(span > 0, span / top, 1.0))
    return Steps(scale.to(torch.float32), zero)


def stored_scale(scale: Tensor) -> Tensor:
    """Scales in the type of files: float16, or float32 if they are out of its range.

    A scale too small to matter (its group is almost zero compared with others) is raised to the
    smallest one that keeps some bits.
    """
    if bool((scale > LARGEST_SCALE).any()):
        return scale.to(torch.float32)
    if float(scale.amax()) < LEAST_OF_HALVES:  # a whole matrix of tiny values keeps its precision
        return scale.to(torch.float32)
    return scale.clamp(min=SMALLEST_SCALE).to(torch.float16)


def as_affine(codes: Tensor, steps: Steps, spec: QuantSpec, columns: int) -> Affine:
    """The layout of codes ``[N, columns]`` (any type) and the steps of their groups."""
    return packed_affine(pack_codes(codes.to(torch.uint8), spec.bits), steps, spec, columns)


def packed_affine(packed: Tensor, steps: Steps, spec: QuantSpec, columns: int) -> Affine:
    """The layout of packed codes and the steps of their groups."""
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
    """:raises QuantizationError: ``spec`` is not a type of 2- to 8-bit integers."""
    if spec.kind != "int" or not 2 <= spec.bits <= 8:
        raise QuantizationError(f"expected integers of 2 to 8 bits, found {spec}")


def round_to_nearest(weight: Tensor, spec: QuantSpec) -> Affine:
    """``weight``, float32 ``[N, K]``, each value rounded to the nearest step of its group (RTN).

    This is the baseline, and good enough for 8 bits.

    :raises QuantizationError: ``spec`` is not an integer type.
    """
    shape = weight.shape[0], weight.shape[1]
    return round_rows(lambda start, end: weight[start:end], shape, spec)


def round_rows(
    rows: Callable[[int, int], Tensor], shape: tuple[int, int], spec: QuantSpec
) -> Affine:
    """:func:`round_to_nearest` of a matrix of ``shape``; ``rows(start, end)`` makes some rows.

    Rows are made twice, because the type of the scales depends on all of them. The results are
    allocated first: between float32 copies of rows they kept glibc from merging freed memory, and
    the peak memory of the same load varied from 250 to 410 MiB.
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
    return packed_affine(packed, steps, spec, columns)


def joined_steps(parts: Sequence[Steps]) -> Steps:
    """The steps of several parts, concatenated along the rows."""
    return Steps(torch.cat([p.scale for p in parts]), torch.cat([p.zero for p in parts]))
