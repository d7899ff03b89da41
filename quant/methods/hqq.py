"""HQQ: zero points that fit most weights of a group, found without data.

Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models" (2023). A group
keeps the steps of rounding to nearest. Its zero point, a real number, is moved to minimize the
error in a norm below 1, which tolerates outliers. Half-quadratic splitting turns that into two
closed forms that alternate: shrink the error ``e`` of every weight, then average the zero point.
Everything is in units of a step, so that the strength of the shrinking (``beta``) does not depend
on the size of the weights.
"""

from __future__ import annotations

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.reference.decode import pack_codes
from sdk.kernels.weights.layouts import Affine
from sdk.quant.methods.integers import check_integers, fit_steps, group_of, grouped, stored_scale
from sdk.quant.spec import QuantSpec

_ROUNDS = 10
_NORM = 0.7
_BETA = 10.0
_BETA_GROWTH = 1.01
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
    step = max(_CHUNK // (groups.shape[1] * groups.shape[2]), 1)
    parts = [_chunk(groups[i : i + step], spec) for i in range(0, rows, step)]
    codes, scale, minus = (torch.cat(found) for found in zip(*parts, strict=True))
    packed = pack_codes(codes.reshape(rows, -1)[:, :columns], spec.bits)
    group = group_of(spec, columns)
    stored = stored_scale(scale)
    fits = stored.dtype == torch.float16 and float(minus.abs().max()) <= _LARGEST_HALF
    minus = minus.half() if fits else minus
    return Affine((rows, columns), spec.bits, group, packed, stored, minus=minus)


def _chunk(groups: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor, Tensor]:
    start = fit_steps(groups, spec)
    top = 2**spec.bits - 1
    values = groups / start.scale.unsqueeze(2)
    zero = start.zero.unsqueeze(2)
    best, least = zero, torch.full_like(zero, float("inf"))
    beta = _BETA
    for _ in range(_ROUNDS):
        codes = torch.round(values + zero).clamp_(0, top)
        error = values - codes + zero
        size = error.abs()
        slope = size.clamp(min=1e-8).pow_(_NORM - 1)
        total = (size * slope).sum(2, keepdim=True)
        better = total < least
        if not bool(better.any()):
            break
        least, best = torch.where(better, total, least), torch.where(better, zero, best)
        kept = error.sign_().mul_(size.sub_(slope.div_(beta)).clamp_(min=0))
        zero = codes.sub_(values).add_(kept).mean(2, keepdim=True)
        beta *= _BETA_GROWTH
    codes = torch.round(values + best).clamp_(0, top)
    return codes.to(torch.uint8), start.scale, best.squeeze(2) * start.scale
