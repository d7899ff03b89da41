"""HQQ: zero points that fit most weights of a group, found without data.

Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models" (2023). A group
keeps the steps of rounding to nearest. Its zero point, a real number, is moved to minimize the
error in a norm below 1, which tolerates outliers. Half-quadratic splitting turns that into two
closed forms that alternate: shrink the error ``e`` of every weight, then average the zero point.
Everything is in units of a step, so that the strength of the shrinking (``beta``) does not depend
on the size of the weights.

The kernels (kernels/cpu/native/round_rows.hpp) give the same bits. So everything here is an
operation that IEEE 754 rounds in one way, and sums go over the weights of a group one after
another.
"""

from __future__ import annotations

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.reference.decode import pack_codes
from sdk.kernels.weights.layouts import Affine
from sdk.quant.methods.integers import check_integers, fit_steps, group_of, grouped, stored_scale
from sdk.quant.spec import QuantSpec

#: Also in kernels/cpu/native/abi_rounding.hpp, and the next two.
_ROUNDS = 10
#: The strength by which an error ``e`` is shrunk is ``|e|^-0.3``: a norm of 0.7. A number's
#: bits are about its logarithm, so the bits of the power are a line of those of ``|e|``: within
#: 3.6 %.
_SLOPE_FACTOR, _SLOPE_OFFSET = 0.3, 1384409216.0
#: 1 / (10 * 1.01^round): the inverse of ``beta``.
_INVERSE_BETAS = tuple(0.1 / 1.01**number for number in range(_ROUNDS))
_LARGEST_HALF = 65504.0
#: Weights processed at a time: they stay in the caches, and memory is bounded.
_CHUNK = 1 << 18


def hqq(weight: Tensor, spec: QuantSpec) -> Affine:
    """``weight``, float32 ``[N, K]``, as codes with a scale and ``minus = scale * zero`` per group.

    :raises QuantizationError: ``spec`` is not an integer type.
    """
    check_integers(spec)
    rows, columns = weight.shape
    groups = grouped(weight, group_of(spec, columns))
    start = fit_steps(groups, spec)
    step = max(_CHUNK // (groups.shape[1] * groups.shape[2]), 1)
    cuts = [slice(i, i + step) for i in range(0, rows, step)]
    parts = [_chunk(groups[cut], start.scale[cut], start.zero[cut], spec.bits) for cut in cuts]
    codes, minus = (torch.cat(found) for found in zip(*parts, strict=True))
    packed = pack_codes(codes.reshape(rows, -1)[:, :columns], spec.bits)
    return as_stored(packed, stored_scale(start.scale), minus, spec, columns)


def as_stored(
    packed: Tensor, scale: Tensor, minus: Tensor, spec: QuantSpec, columns: int
) -> Affine:
    """The layout of packed codes, stored scales and ``minus``, float32 ``[N, G]``: float16, too, if
    the scales are and it fits."""
    fits = scale.dtype == torch.float16 and float(minus.abs().max()) <= _LARGEST_HALF
    minus = minus.half() if fits else minus
    group = group_of(spec, columns)
    return Affine((packed.shape[0], columns), spec.bits, group, packed, scale, minus=minus)


def _chunk(groups: Tensor, scale: Tensor, zero: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 ``[n, G, g]`` and ``minus [n, G]`` of some rows."""
    top = 2**bits - 1
    values = (groups / scale.unsqueeze(2)).permute(2, 0, 1).contiguous()
    best, least = zero, torch.full_like(zero, float("inf"))
    for inverse in _INVERSE_BETAS:
        places = values + zero
        error = places - torch.round(places).clamp_(0, top)
        size = error.abs()
        slope = power(size)
        total = _sum(size * slope)
        better = total < least
        least, best = torch.where(better, total, least), torch.where(better, zero, best)
        kept = torch.minimum(size, slope.mul_(inverse)).copysign_(error)
        zero = zero - _sum(kept).div_(len(values))
    codes = torch.round(values + best).clamp_(0, top)
    return codes.to(torch.uint8).permute(1, 2, 0).contiguous(), best * scale


def power(size: Tensor) -> Tensor:
    """About ``size^-0.3`` of float32 numbers from 0 on."""
    line = _SLOPE_OFFSET - size.view(torch.int32).to(torch.float32).mul_(_SLOPE_FACTOR)
    return line.to(torch.int32).view(torch.float32)


def _sum(values: Tensor) -> Tensor:
    """The sum along the first dimension, one after another."""
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total
