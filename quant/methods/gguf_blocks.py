"""GGUF blocks of 32 values with one scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL; and MXFP4.

Without data all except IQ4_NL are closed forms, byte for byte as in ggml. ``d`` is stored as
float16, but codes are chosen by its float32 value. Q4_0 and Q5_0 put the value of largest
magnitude, with its sign, on the lowest code, because the range is one step longer on that side. If
statistics of the inputs are known, and always for IQ4_NL, steps are searched for.

Source: ggml-quants.c, ``quantize_row_*_ref``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.weights.layouts import BLOCK_TYPES, Blocks
from sdk.quant.errors import QuantizationError
from sdk.quant.methods.block_search import (
    Bytes,
    Floats,
    best_line,
    best_scale,
    best_table_scale,
    importance,
    nearest,
    reciprocal,
)
from sdk.quant.methods.float4 import mxfp4_groups

#: Values quantized at a time, so that temporaries fit the caches.
_CHUNK = 1 << 18


@dataclass(frozen=True, slots=True)
class BlockSteps:
    """Scales of blocks: a value is ``scale * level + offset`` of its group.

    ``stored``, float32 ``[B, 1 or 2]``: the fields that the file holds as float16. ``small``, uint8
    ``[B, n]``: the small integer scales, in formats that have them. ``scale`` and ``offset``
    ``[B, G]`` are computed from both. ``table``: the level of each code; None if the code, up to
    ``top``, is the level.
    """

    stored: Floats
    small: Bytes
    scale: Floats
    offset: Floats
    top: int
    table: Floats | None = None

    def codes(self, x: Floats) -> Bytes:
        """Codes ``[B, values]`` of the levels nearest to ``x [B, G, g]``."""
        units = (x - self.offset[:, :, None]) * reciprocal(self.scale)[:, :, None]
        if self.table is not None:
            found = nearest(units, self.table)
        else:
            found = np.rint(units).clip(0, self.top).astype(np.uint8)
        return found.reshape(len(x), -1)


def one_scale_blocks(weight: Tensor, kind: str, mean_square: Tensor | None = None) -> Blocks:
    """``weight``, float32 ``[N, K]``, in blocks of type ``kind``.

    ``mean_square`` of the inputs, float32 ``[K]``, weights the errors, if known.

    :raises QuantizationError: K is not a multiple of the block size, or ``kind`` is not one of
        this module's types.
    """
    check_kind(kind, (*ONE_SCALE, "mxfp4"))
    inputs = None if mean_square is None else mean_square.numpy()

    def make(x: Floats, own: Floats | None) -> Bytes:
        if kind == "mxfp4":
            return _mxfp4(x)
        if kind in _CLOSED and (own is None or kind == "q8_0"):
            stored, codes = _CLOSED[kind](x)
        else:
            steps = one_scale_steps(x, kind, own)
            stored, codes = steps.stored, steps.codes(x[:, None])
        return pack_one_scale(kind, stored, codes)

    return Blocks((weight.shape[0], weight.shape[1]), kind, in_blocks(weight, kind, make, inputs))


def one_scale_steps(x: Floats, kind: str, inputs: Floats | None) -> BlockSteps:
    """Steps for blocks ``x [B, 32]``; ``inputs`` has the same shape."""
    groups = x[:, None]
    w = importance(groups, inputs)
    none = np.zeros((len(x), 0), np.uint8)
    if kind == "iq4_nl":
        table = np.array(BLOCK_TYPES[kind].table, np.float32)
        d = half(best_table_scale(groups, w, table))
        return BlockSteps(d, none, d, np.zeros_like(d), 15, table)
    bits = {"q4_0": 4, "q4_1": 4, "q5_0": 5, "q5_1": 5}[kind]
    if kind.endswith("1"):
        d, least = map(half, best_line(groups, w, 2**bits - 1, below=False))
        return BlockSteps(np.concatenate((d, least), 1), none, d, least, 2**bits - 1)
    middle = 2 ** (bits - 1)
    d = half(best_scale(groups, w, middle))
    return BlockSteps(d, none, d, -middle * d, 2**bits - 1)


def pack_one_scale(kind: str, stored: Floats, codes: Bytes) -> Bytes:
    """The bytes of blocks: their float16 fields, then the codes ``[B, 32]``."""
    if kind == "q8_0":
        return np.concatenate((halves(stored), codes), 1)
    if kind.startswith("q5"):
        fifth = np.packbits(codes >> 4, axis=1, bitorder="little")
        return np.concatenate((halves(stored), fifth, nibbles(codes & 15)), 1)
    return np.concatenate((halves(stored), nibbles(codes)), 1)


def check_kind(kind: str, known: tuple[str, ...]) -> None:
    """:raises QuantizationError: ``kind`` is not in ``known``."""
    if kind not in known:
        raise QuantizationError(f"expected one of {', '.join(known)}, found {kind!r}")


def in_blocks(
    weight: Tensor,
    kind: str,
    make: Callable[[Floats, Floats | None], Bytes],
    inputs: Floats | None = None,
) -> Tensor:
    """The bytes of all rows. ``make`` turns values ``[B, elements]`` and the ``inputs [K]`` that
    belong to them into bytes ``[B, nbytes]``.

    :raises QuantizationError: K is not a multiple of the block size.
    """
    values, own = block_values(weight, kind, inputs)
    data = np.empty((len(values), BLOCK_TYPES[kind].nbytes), np.uint8)
    step = max(_CHUNK // values.shape[1], 1)
    for i in range(0, len(values), step):
        part = None if own is None else own[np.arange(i, min(i + step, len(values))) % len(own)]
        data[i : i + step] = make(values[i : i + step], part)
    return torch.from_numpy(data.reshape(weight.shape[0], -1))


def block_values(weight: Tensor, kind: str, inputs: Floats | None) -> tuple[Floats, Floats | None]:
    """Values, and inputs if known, as blocks ``[B, elements]``.

    :raises QuantizationError: K is not a multiple of the block size.
    """
    columns, elements = weight.shape[1], BLOCK_TYPES[kind].elements
    if columns % elements:
        raise QuantizationError(
            f"{kind} needs rows whose length is a multiple of {elements}, found {columns}"
        )
    values = np.ascontiguousarray(weight.numpy(), np.float32).reshape(-1, elements)
    return values, None if inputs is None else inputs.reshape(-1, elements)


def half(values: Floats) -> Floats:
    """Values rounded to float16, the type in which ``d`` is stored."""
    limit = np.float32(65504)
    found: Floats = values.clip(-limit, limit).astype(np.float16).astype(np.float32)
    return found


def halves(values: Floats) -> Bytes:
    """The bytes ``[B, 2 n]`` of values float32 ``[B, n]`` as float16."""
    return values.astype("<f2").view(np.uint8).reshape(len(values), -1)


def nibbles(codes: Bytes) -> Bytes:
    """Codes ``[B, 32]`` below 16, packed: the first 16 are low nibbles, the others high ones."""
    middle = codes.shape[1] // 2
    joined: Bytes = codes[:, :middle] | (codes[:, middle:] << 4)
    return joined


def _around_zero(x: Floats, bits: int) -> tuple[Floats, Bytes]:
    largest = np.take_along_axis(x, np.abs(x).argmax(1)[:, None], 1)
    d = largest / np.float32(-(2 ** (bits - 1)))
    middle = np.float32(2 ** (bits - 1) + 0.5)
    codes = np.trunc(x * reciprocal(d) + middle).clip(0, 2**bits - 1)
    return d, codes.astype(np.uint8)


def _from_least(x: Floats, bits: int) -> tuple[Floats, Bytes]:
    least = x.min(1, keepdims=True)
    d = (x.max(1, keepdims=True) - least) / np.float32(2**bits - 1)
    codes = np.trunc((x - least) * reciprocal(d) + np.float32(0.5)).clip(0, 2**bits - 1)
    return np.concatenate((d, least), 1), codes.astype(np.uint8)


def _signed_bytes(x: Floats) -> tuple[Floats, Bytes]:
    d = np.abs(x).max(1, keepdims=True) / np.float32(127)
    scaled = x * reciprocal(d)
    away = np.trunc(np.abs(scaled) + np.float32(0.5))  # halves round away from zero, as in roundf
    return d, np.copysign(away, scaled).astype(np.int8).view(np.uint8)


def _mxfp4(x: Floats) -> Bytes:
    """The same scales and codes as float4.py."""
    scale, codes = mxfp4_groups(torch.from_numpy(x).unsqueeze(1))
    return np.concatenate((scale.view(torch.uint8).numpy(), nibbles(codes[:, 0].numpy())), 1)


_CLOSED: dict[str, Callable[[Floats], tuple[Floats, Bytes]]] = {
    "q4_0": lambda x: _around_zero(x, 4),
    "q4_1": lambda x: _from_least(x, 4),
    "q5_0": lambda x: _around_zero(x, 5),
    "q5_1": lambda x: _from_least(x, 5),
    "q8_0": _signed_bytes,
}
ONE_SCALE = (*_CLOSED, "iq4_nl")
