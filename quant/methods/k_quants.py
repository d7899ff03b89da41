"""GGUF k-quants, Q2_K to Q6_K: blocks of 256 values, with a small integer scale per 16 or 32.

There are two kinds. With minima (Q2_K, Q4_K, Q5_K): ``w = d * sc * code - dmin * m``, where ``sc``
and ``m`` have 4 or 6 bits. Without (Q3_K, Q6_K): ``w = d * sc * code``, signed. Each group's scale
and minimum are searched for and rounded to integers. Then codes are chosen again, and ``d`` (and
``dmin``) are fitted once more to the whole block.

Source of the byte layout: ggml-quants.c. llama.cpp lacks the last fit, so its bytes differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sdk.kernels.lazy_torch import Tensor
from sdk.kernels.weights.layouts import Blocks
from sdk.quant.methods.block_search import (
    Bytes,
    Floats,
    best_line,
    best_scale,
    importance,
    reciprocal,
)
from sdk.quant.methods.gguf_blocks import (
    BlockSteps,
    check_kind,
    half,
    halves,
    in_blocks,
    nibbles,
)


@dataclass(frozen=True, slots=True)
class _Kind:
    """``top``: the largest code or scale of a kind with minima; signed kinds start at ``-top``."""

    group: int
    top: int
    scale_top: int
    minima: bool


_KINDS = {
    "q2_k": _Kind(16, 3, 15, True),
    "q3_k": _Kind(16, 4, 32, False),
    "q4_k": _Kind(32, 15, 63, True),
    "q5_k": _Kind(32, 31, 63, True),
    "q6_k": _Kind(16, 32, 128, False),
}
K_QUANTS = tuple(_KINDS)


def k_blocks(weight: Tensor, kind: str, mean_square: Tensor | None = None) -> Blocks:
    """``weight``, float32 ``[N, K]``, in k-quant blocks of type ``kind``.

    ``mean_square`` of the inputs, float32 ``[K]``, weights the errors, if known.

    :raises QuantizationError: K is not a multiple of 256, or ``kind`` is not a k-quant.
    """
    check_kind(kind, K_QUANTS)
    inputs = None if mean_square is None else mean_square.numpy()

    def make(x: Floats, own: Floats | None) -> Bytes:
        steps = k_steps(x, kind, own)
        return pack_k(kind, steps, steps.codes(x.reshape(len(x), -1, _KINDS[kind].group)))

    return Blocks((weight.shape[0], weight.shape[1]), kind, in_blocks(weight, kind, make, inputs))


def k_steps(x: Floats, kind: str, inputs: Floats | None) -> BlockSteps:
    """Steps for blocks ``x [B, 256]``; ``inputs`` has the same shape."""
    facts = _KINDS[kind]
    groups = x.reshape(len(x), -1, facts.group)
    w = importance(groups, inputs)
    return _with_minima(groups, w, facts) if facts.minima else _signed(groups, w, facts)


def pack_k(kind: str, steps: BlockSteps, codes: Bytes) -> Bytes:
    """The bytes of blocks with these codes ``[B, 256]``."""
    return _PACKERS[kind](steps.stored, steps.small, codes)


def _with_minima(x: Floats, w: Floats, kind: _Kind) -> BlockSteps:
    scale, least = best_line(x, w, kind.top)
    d, sc = _integers(scale, kind.scale_top)
    dmin, m = _integers(-least, kind.scale_top)
    codes = _codes(x, d * sc, dmin * m, kind.top)
    d, dmin = _refit(x, w, sc[:, :, None] * codes, -m[:, :, None], d, dmin)
    small = np.concatenate((sc, m), 1).astype(np.uint8)
    return BlockSteps(np.concatenate((d, dmin), 1), small, d * sc, -dmin * m, kind.top)


def _integers(values: Floats, top: int) -> tuple[Floats, Floats]:
    """Non-negative values ``[B, G]`` as ``d [B, 1]`` (a float16) times integers up to ``top``."""
    values = np.maximum(values, 0)
    d = half(values.max(1, keepdims=True) / np.float32(top))
    return d, np.rint(values * reciprocal(d)).clip(0, top)


def _codes(x: Floats, scale: Floats, minimum: Floats, top: int) -> Floats:
    found: Floats = np.rint((x + minimum[:, :, None]) * reciprocal(scale)[:, :, None]).clip(0, top)
    return found


def _refit(
    x: Floats, w: Floats, a: Floats, b: Floats, d: Floats, dmin: Floats
) -> tuple[Floats, Floats]:
    """``d`` and ``dmin`` that bring ``d * a + dmin * b`` closest to ``x``; unchanged if that is
    underdetermined."""
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
    return half(d), half(np.where(fine[:, None], new_dmin[:, None], dmin))


def _signed(x: Floats, w: Floats, kind: _Kind) -> BlockSteps:
    top, most = kind.top, kind.scale_top
    scale = best_scale(x, w, top)
    extreme = np.take_along_axis(scale, np.abs(scale).argmax(1)[:, None], 1)
    d = half(extreme / np.float32(-most))
    sc = np.rint(scale * reciprocal(d)).clip(-most, most - 1)
    levels = np.rint(x * reciprocal(d * sc)[:, :, None]).clip(-top, top - 1)
    steps = sc[:, :, None] * levels
    fitted = (w * steps * x).sum((1, 2)) * reciprocal((w * steps * steps).sum((1, 2)))
    d = half(np.where(fitted * d[:, 0] > 0, fitted, d[:, 0])[:, None])
    small = sc.astype(np.int8).view(np.uint8)
    return BlockSteps(d, small, d * sc, -top * (d * sc), 2 * top - 1)


def _crumbs(codes: Bytes) -> Bytes:
    """Codes ``[B, 256]`` below 4, packed per 128: byte l holds codes l, l + 32, l + 64, l + 96."""
    parts = codes.reshape(-1, 2, 4, 32)
    joined = parts[:, :, 0] | parts[:, :, 1] << 2 | parts[:, :, 2] << 4 | parts[:, :, 3] << 6
    return np.ascontiguousarray(joined).reshape(-1, 64)


def _by_64(codes: Bytes) -> Bytes:
    """Codes ``[B, 256]`` below 16, packed per 64: low nibbles of 32 bytes, then the high ones."""
    return nibbles(codes.reshape(-1, 64)).reshape(-1, 128)


def _planes(codes: Bytes) -> Bytes:
    """Bits ``[B, 256]``, packed: byte l holds bits l, l + 32, ..., l + 224."""
    return np.packbits(codes.reshape(-1, 8, 32), axis=1, bitorder="little").reshape(-1, 32)


def _six_bits(both: Bytes) -> Bytes:
    """Eight scales and eight minima of 6 bits, packed in 12 bytes."""
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
