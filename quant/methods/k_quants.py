"""GGUF k-quants, Q2_K to Q6_K: 256 values, a small integer scale per 16 or 32 of them.

Two kinds. With minima (Q2_K, Q4_K, Q5_K): ``w = d * sc * code - dmin * m``, ``sc`` and ``m`` of 4
or 6 bits. Without (Q3_K, Q6_K): ``w = d * sc * code``, signed. For each group a few widths of the
grid are tried; for each, the codes that come out give scale and minimum by weighted least squares,
and the best is kept. Then the scales are rounded to integers, the codes chosen again, and ``d``
(and ``dmin``) fitted once more to the whole block. Errors are weighed by how much a value is likely
to matter: by its size, and by the mean square of the inputs where that is known.

Sources: ggml-quants.c for the layout of the bytes and the idea of the search (make_qkx2_quants,
make_qx_quants); the last fit is not in it, so bytes differ from llama.cpp's.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from sdk.kernels.layouts import Blocks
from sdk.quant.methods.gguf_blocks import Bytes, Floats, halves, in_blocks, nibbles, reciprocal


@dataclass(frozen=True, slots=True)
class _Kind:
    """``top``: the largest code, or scale, of a kind with minima; signed ones reach ``-top``."""

    group: int
    top: int
    scale_top: int
    minima: bool


K_QUANTS = {
    "q2_k": _Kind(16, 3, 15, True),
    "q3_k": _Kind(16, 4, 32, False),
    "q4_k": _Kind(32, 15, 63, True),
    "q5_k": _Kind(32, 31, 63, True),
    "q6_k": _Kind(16, 32, 128, False),
}
#: Widths of the grid tried, in codes more or less than all of them.
_WIDTHS_WITH_MINIMA = np.arange(-1.0, 1.01, 0.1, dtype=np.float32)
_WIDTHS = np.arange(-0.9, 0.91, 0.1, dtype=np.float32)


def k_blocks(weight: Tensor, kind: str, mean_square: Tensor | None = None) -> Blocks:
    """``weight`` float32 ``[N, K]``; ``mean_square`` float32 ``[K]`` of the inputs, if known.

    :raises QuantizationError: K is not a multiple of 256.
    """
    rows, columns = weight.shape
    inputs = None if mean_square is None else mean_square.numpy().reshape(-1, 256)
    done = 0

    def make(x: Floats) -> Bytes:
        nonlocal done
        own = None
        if inputs is not None:
            own = inputs[np.arange(done, done + len(x)) % len(inputs)]
        done += len(x)
        return _PACKERS[kind](*_fitted(x, K_QUANTS[kind], own))

    return Blocks((rows, columns), kind, in_blocks(weight, kind, make))


_Fitted = tuple[Floats, Bytes, Bytes]


def _fitted(x: Floats, kind: _Kind, inputs: Floats | None) -> _Fitted:
    """``(d [B, 1 or 2], scales [B, G or 2 G], codes [B, 256])``, all as they are stored."""
    groups = x.reshape(len(x), -1, kind.group)
    weights = _importance(groups, kind, inputs)
    if kind.minima:
        return _with_minima(groups, weights, kind)
    return _signed(groups, weights, kind)


def _importance(groups: Floats, kind: _Kind, inputs: Floats | None) -> Floats:
    if inputs is not None:
        mean = np.square(groups).mean((1, 2), keepdims=True)
        known: Floats = inputs.reshape(groups.shape) * np.sqrt(mean + np.square(groups))
        return _positive(known)
    if not kind.minima:
        return _positive(np.square(groups))
    spread = np.sqrt(np.square(groups).mean(2, keepdims=True))
    return _positive(np.abs(groups) + spread)


def _positive(weights: Floats) -> Floats:
    """No sum of weights may be 0."""
    found: Floats = weights + np.float32(1e-30)
    return found


def _with_minima(x: Floats, w: Floats, kind: _Kind) -> _Fitted:
    low = np.minimum(x.min(2, keepdims=True), 0)
    span = x.max(2, keepdims=True) - low
    per_unit = reciprocal(span)
    w_sum, w_x = w.sum(2, keepdims=True), (w * x).sum(2, keepdims=True)
    scale, least = span / np.float32(kind.top), low  # all there is to say of a constant
    codes = np.rint((x - low) * (per_unit * kind.top))
    off = codes * scale + least - x
    best = (w * off * off).sum(2, keepdims=True)
    for width in _WIDTHS_WITH_MINIMA:
        codes = np.rint((x - low) * (per_unit * (kind.top + width))).clip(0, kind.top)
        tried, offset = _line(x, w, codes, w_sum, w_x)
        off = codes * tried + offset - x
        error = (w * off * off).sum(2, keepdims=True)
        better = error < best
        best = np.where(better, error, best)
        scale, least = np.where(better, tried, scale), np.where(better, offset, least)
    d, sc = _integers(scale[:, :, 0], kind.scale_top)
    dmin, m = _integers(-least[:, :, 0], kind.scale_top)
    codes = _codes(x, d * sc, dmin * m, kind.top)
    d, dmin = _refit(x, w, sc[:, :, None] * codes, -m[:, :, None], d, dmin)
    codes = _codes(x, d * sc, dmin * m, kind.top)
    both = np.concatenate((sc, m), 1).astype(np.uint8)
    flat = codes.reshape(len(x), -1).astype(np.uint8)
    return np.concatenate((d, dmin), 1), both, flat


def _line(x: Floats, w: Floats, codes: Floats, w_sum: Floats, w_x: Floats) -> tuple[Floats, Floats]:
    """Scale and offset (at most 0) of the weighted line through ``(codes, x)``."""
    weighted = w * codes
    w_l = weighted.sum(2, keepdims=True)
    w_ll = (weighted * codes).sum(2, keepdims=True)
    w_xl = (weighted * x).sum(2, keepdims=True)
    bottom = reciprocal(np.maximum(w_sum * w_ll - w_l * w_l, 0))
    scale = (w_sum * w_xl - w_x * w_l) * bottom
    offset = (w_ll * w_x - w_l * w_xl) * bottom
    above = offset > 0
    scale = np.where(above, w_xl * reciprocal(w_ll), scale)
    return scale, np.where(above, np.float32(0), offset)


def _integers(values: Floats, top: int) -> tuple[Floats, Floats]:
    """Values from 0 on ``[B, G]`` as ``d [B, 1]`` (a float16) times integers up to ``top``."""
    values = np.maximum(values, 0)
    d = _half(values.max(1, keepdims=True) / np.float32(top))
    return d, np.rint(values * reciprocal(d)).clip(0, top)


def _codes(x: Floats, scale: Floats, minimum: Floats, top: int) -> Floats:
    found: Floats = np.rint((x + minimum[:, :, None]) * reciprocal(scale)[:, :, None]).clip(0, top)
    return found


def _refit(
    x: Floats, w: Floats, a: Floats, b: Floats, d: Floats, dmin: Floats
) -> tuple[Floats, Floats]:
    """``d`` and ``dmin`` that bring ``d * a + dmin * b`` nearest to ``x``; as they were where that
    is not determined."""
    b = np.broadcast_to(b, a.shape)
    axes = (1, 2)
    aa, bb, ab = ((w * p * q).sum(axes) for p, q in ((a, a), (b, b), (a, b)))
    ax, bx = (w * a * x).sum(axes), (w * b * x).sum(axes)
    bottom = aa * bb - ab * ab
    fine = bottom > 1e-6 * aa * bb
    inverse = reciprocal(np.where(fine, bottom, 0))
    new_d, new_dmin = (ax * bb - bx * ab) * inverse, (bx * aa - ax * ab) * inverse
    fine &= (new_d > 0) & (new_dmin >= 0)
    alone = ~fine & (aa > 0) & (bb == 0)
    new_d = np.where(alone, ax * reciprocal(aa), new_d)
    d = np.where((fine | (alone & (new_d > 0)))[:, None], new_d[:, None], d)
    return _half(d), _half(np.where(fine[:, None], new_dmin[:, None], dmin))


def _signed(x: Floats, w: Floats, kind: _Kind) -> _Fitted:
    at = np.abs(x).argmax(2, keepdims=True)
    largest = np.take_along_axis(x, at, 2)  # with its sign: it takes the lowest code
    inverse = -reciprocal(largest)
    scale = np.zeros_like(largest)
    best = np.full_like(largest, -1)
    for width in _WIDTHS:
        codes = np.rint(x * (inverse * (kind.top + width))).clip(-kind.top, kind.top - 1)
        weighted = w * codes
        w_xl = (weighted * x).sum(2, keepdims=True)
        w_ll = (weighted * codes).sum(2, keepdims=True)
        gain = w_xl * w_xl * reciprocal(w_ll)
        better = gain > best
        best = np.where(better, gain, best)
        scale = np.where(better, w_xl * reciprocal(w_ll), scale)
    found = scale[:, :, 0]
    extreme = np.take_along_axis(found, np.abs(found).argmax(1)[:, None], 1)
    d = _half(extreme / np.float32(-kind.scale_top))
    sc = np.rint(found * reciprocal(d)).clip(-kind.scale_top, kind.scale_top - 1)
    codes = _signed_codes(x, d * sc, kind.top)
    steps = sc[:, :, None] * codes
    fitted = (w * steps * x).sum((1, 2)) * reciprocal((w * steps * steps).sum((1, 2)))
    d = _half(np.where(fitted * d[:, 0] > 0, fitted, d[:, 0])[:, None])
    codes = _signed_codes(x, d * sc, kind.top)
    unsigned = (codes + kind.top).reshape(len(x), -1).astype(np.uint8)
    return d, sc.astype(np.int8).view(np.uint8), unsigned


def _signed_codes(x: Floats, scale: Floats, top: int) -> Floats:
    found: Floats = np.rint(x * reciprocal(scale)[:, :, None]).clip(-top, top - 1)
    return found


def _half(values: Floats) -> Floats:
    """Rounded to float16, in which ``d`` is stored."""
    limit = np.float32(65504)
    return values.clip(-limit, limit).astype(np.float16).astype(np.float32)


def _crumbs(codes: Bytes) -> Bytes:
    """Codes ``[B, 256]`` below 4, per 128: byte l holds those of l, l + 32, l + 64 and l + 96."""
    parts = codes.reshape(-1, 2, 4, 32)
    joined = parts[:, :, 0] | parts[:, :, 1] << 2 | parts[:, :, 2] << 4 | parts[:, :, 3] << 6
    return np.ascontiguousarray(joined).reshape(-1, 64)


def _by_64(codes: Bytes) -> Bytes:
    """Codes ``[B, 256]`` below 16, per 64: the low nibbles of 32 bytes, then the high ones."""
    return nibbles(codes.reshape(-1, 64)).reshape(-1, 128)


def _planes(codes: Bytes) -> Bytes:
    """Bits ``[B, 256]``: byte l holds those of l, l + 32, ..., l + 224."""
    return np.packbits(codes.reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)


def _six_bits(both: Bytes) -> Bytes:
    """Eight scales and eight minima of 6 bits in 12 bytes."""
    sc, m = both[:, :8], both[:, 8:]
    first = sc[:, :4] | (sc[:, 4:] >> 4 << 6)
    second = m[:, :4] | (m[:, 4:] >> 4 << 6)
    return np.concatenate((first, second, (sc[:, 4:] & 15) | (m[:, 4:] & 15) << 4), 1)


def _q2_k(d: Floats, scales: Bytes, codes: Bytes) -> Bytes:
    return np.concatenate((scales[:, :16] | scales[:, 16:] << 4, _crumbs(codes), halves(d)), 1)


def _q3_k(d: Floats, scales: Bytes, codes: Bytes) -> Bytes:
    up = scales + np.uint8(32)  # wraps: -32 .. 31 becomes 0 .. 63
    high = (up >> 4).reshape(-1, 4, 4)
    tops = high[:, 0] | high[:, 1] << 2 | high[:, 2] << 4 | high[:, 3] << 6
    low = nibbles(up & 15)
    return np.concatenate((_planes(codes >> 2), _crumbs(codes & 3), low, tops, halves(d)), 1)


def _q4_k(d: Floats, scales: Bytes, codes: Bytes) -> Bytes:
    return np.concatenate((halves(d), _six_bits(scales), _by_64(codes)), 1)


def _q5_k(d: Floats, scales: Bytes, codes: Bytes) -> Bytes:
    low = _by_64(codes & 15)
    return np.concatenate((halves(d), _six_bits(scales), _planes(codes >> 4), low), 1)


def _q6_k(d: Floats, scales: Bytes, codes: Bytes) -> Bytes:
    low = nibbles((codes & 15).reshape(-1, 128)).reshape(-1, 128)
    return np.concatenate((low, _crumbs(codes >> 4), scales, halves(d)), 1)


_PACKERS = {"q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k}
