"""Quantized activations: the definition of every :class:`ActivationScheme`.

A row is cut into groups. Each group is divided by its scale, and the quotients are rounded to the
nearest code, ties to even. The result is float32, ``scale * (code - zero)``. ``plain`` scales map
the largest magnitude (for asymmetric integers: the range) to the end of the codes. Native code
gives the same codes and scales bit for bit.

Sources: compressed-tensors 0.19 (``calculate_qparams``, ``fake_quantize``) for everything except
``power``, DeepSeek-V3.1's ``scale_fmt: ue8m0``, ``limit``, FBGEMM's ``scale_ub``, and ``absmax``,
BitNet b1.58 (arXiv 2402.17764, section 2; transformers' ``integrations/bitnet.py``).
"""

from __future__ import annotations

import math

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.weights.layouts import ActivationScheme

#: Groups that are smaller than this count as zero: their scales would not be normal numbers.
LEAST = 1e-30
#: Of a float: the largest value, the smallest normal one, bits of the mantissa.
_FLOATS = {"e4m3": (448.0, 2.0**-6, 3), "e2m1": (6.0, 1.0, 1)}
#: OCP Microscaling 1.0: the exponent of the largest power of two among the codes.
_MX_EXPONENT = {"e4m3": 8, "e2m1": 2}


def fake_quantize(x: Tensor, scheme: ActivationScheme) -> Tensor:
    """``x``, float32 ``[M, K]``, quantized and dequantized. Groups with a NaN or inf become NaN."""
    rows, columns = x.shape
    group = min(scheme.group or columns, columns)
    groups = torch.nn.functional.pad(x, (0, -columns % group)).reshape(rows, -1, group)
    low, high = groups.amin(2, True).clamp(max=0), groups.amax(2, True).clamp(min=0)
    peak = torch.maximum(-low, high)
    if scheme.static is None:
        scale = scales_of(low, high, scheme)
        zero = _zeros_of(low, scale, scheme)
    else:
        scale = torch.full_like(peak, scheme.static)
        zero = torch.full_like(peak, float(scheme.zero))
    values = codes_of(groups / scale, zero, scheme) * scale
    if scheme.static is None:
        values = torch.where((peak > LEAST) & (scale > 0), values, 0.0)
    values = torch.where(peak.isfinite(), values, math.nan)
    return values.reshape(rows, -1)[:, :columns].contiguous()


def scales_of(low: Tensor, high: Tensor, scheme: ActivationScheme) -> Tensor:
    """The scales of groups with values from ``low`` (<= 0) to ``high`` (>= 0)."""
    peak = torch.maximum(-low, high).clamp(max=scheme.limit)
    if scheme.rule == "mx":
        exponent = _MX_EXPONENT[scheme.codes]
        return _power_below(peak.view(torch.int32) + (1 << 21)) * 2.0**-exponent
    if scheme.floats:
        scale = peak / _FLOATS[scheme.codes][0]
    elif scheme.rule == "absmax":
        scale = peak / ((1 << scheme.bits - 1) - 1)
    elif scheme.symmetric:
        scale = peak / (((1 << scheme.bits) - 1) / 2)
    else:
        scale = (high - low) / ((1 << scheme.bits) - 1)
    if scheme.rule == "power":
        return _power_below(scale.view(torch.int32) + (1 << 23) - 1)
    if scheme.rule == "nv":
        return _to_float(scale * scheme.factor, "e4m3") / scheme.factor
    return scale


def _zeros_of(low: Tensor, scale: Tensor, scheme: ActivationScheme) -> Tensor:
    if scheme.symmetric:
        return torch.zeros_like(scale)
    least = -float(1 << scheme.bits - 1)
    return (least - low / scale).clamp(least, -least - 1).round()


def codes_of(quotients: Tensor, zero: Tensor, scheme: ActivationScheme) -> Tensor:
    """``code - zero`` for each quotient."""
    if scheme.floats:
        return _to_float(quotients, scheme.codes)
    half = float(1 << scheme.bits - 1)
    return (quotients + zero).clamp(-half, half - 1).round() - zero


def _to_float(x: Tensor, name: str) -> Tensor:
    """The nearest values of the float type ``name``, clamped to its largest."""
    most, least, mantissa = _FLOATS[name]
    size = x.abs().clamp(max=most)
    steps = _power_below(size.contiguous().view(torch.int32)).clamp(min=least) * 2.0**-mantissa
    return torch.copysign((size / steps).round() * steps, x)


def _power_below(bits: Tensor) -> Tensor:
    """Positive floats, given as int32, with the mantissa set to 0."""
    return (bits & 0x7F800000).view(torch.float32)
