"""GGUF blocks with one scale, byte for byte as ggml makes them: Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0;
and MXFP4 as float4.py makes it.

All are closed forms over 32 values; ``d`` is a float16 in the file, yet codes are chosen by its
float32 value. Q4_0 and Q5_0 put the value of largest magnitude, with its sign, on the lowest code,
whose range is one step longer. Source: ggml-quants.c, ``quantize_row_*_ref``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdk.kernels.layouts import BLOCK_TYPES, Blocks
from sdk.quant.errors import QuantizationError
from sdk.quant.methods.float4 import mxfp4_groups

#: float32 and uint8; numpy's stubs do not keep either through arithmetic with constants.
Floats = NDArray[Any]
Bytes = NDArray[Any]

#: Values quantized at a time, so that what lies between fits the caches.
_CHUNK = 1 << 18


def one_scale_blocks(weight: Tensor, kind: str) -> Blocks:
    """``weight`` float32 ``[N, K]`` in blocks of ``kind``.

    :raises QuantizationError: K is not a multiple of the block, or ``kind`` is none of these.
    """
    make = _MAKERS.get(kind)
    if make is None:
        raise QuantizationError(f"expected one of {', '.join(_MAKERS)}, found {kind!r}")
    return Blocks((weight.shape[0], weight.shape[1]), kind, in_blocks(weight, kind, make))


def in_blocks(weight: Tensor, kind: str, make: Callable[[Floats], Bytes]) -> Tensor:
    """The bytes of all rows; ``make`` turns values ``[B, elements]`` into ``[B, nbytes]``.

    :raises QuantizationError: K is not a multiple of the block.
    """
    rows, columns = weight.shape
    facts = BLOCK_TYPES[kind]
    if columns % facts.elements:
        raise QuantizationError(
            f"{kind} needs rows of a multiple of {facts.elements} values, found {columns}"
        )
    values = np.ascontiguousarray(weight.numpy(), np.float32).reshape(-1, facts.elements)
    data = np.empty((len(values), facts.nbytes), np.uint8)
    step = max(_CHUNK // facts.elements, 1)
    for i in range(0, len(values), step):
        data[i : i + step] = make(values[i : i + step])
    return torch.from_numpy(data.reshape(rows, -1))


def reciprocal(d: Floats) -> Floats:
    """``1 / d``, and 0 where ``d`` is."""
    found: Floats = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
    return found


def halves(values: Floats) -> Bytes:
    """Float32 ``[B, n]`` as float16: its bytes, ``[B, 2 n]``."""
    return values.astype("<f2").view(np.uint8).reshape(len(values), -1)


def nibbles(codes: Bytes) -> Bytes:
    """Codes ``[B, 32]`` below 16: the first 16 are low nibbles, the others high ones."""
    half = codes.shape[1] // 2
    joined: Bytes = codes[:, :half] | (codes[:, half:] << 4)
    return joined


def _fifth_bits(codes: Bytes) -> Bytes:
    return np.packbits(codes >> 4, axis=1, bitorder="little")


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


def _q4_0(x: Floats) -> Bytes:
    d, codes = _around_zero(x, 4)
    return np.concatenate((halves(d), nibbles(codes)), 1)


def _q4_1(x: Floats) -> Bytes:
    d, codes = _from_least(x, 4)
    return np.concatenate((halves(d), nibbles(codes)), 1)


def _q5_0(x: Floats) -> Bytes:
    d, codes = _around_zero(x, 5)
    return np.concatenate((halves(d), _fifth_bits(codes), nibbles(codes & 15)), 1)


def _q5_1(x: Floats) -> Bytes:
    d, codes = _from_least(x, 5)
    return np.concatenate((halves(d), _fifth_bits(codes), nibbles(codes & 15)), 1)


def _q8_0(x: Floats) -> Bytes:
    d = np.abs(x).max(1, keepdims=True) / np.float32(127)
    scaled = x * reciprocal(d)
    away = np.trunc(np.abs(scaled) + np.float32(0.5))  # halves go away from zero, as roundf's do
    codes = np.copysign(away, scaled).astype(np.int8)
    return np.concatenate((halves(d), codes.view(np.uint8)), 1)


def _mxfp4(x: Floats) -> Bytes:
    scale, codes = mxfp4_groups(torch.from_numpy(x).unsqueeze(1))
    return np.concatenate((scale.view(torch.uint8).numpy(), nibbles(codes[:, 0].numpy())), 1)


_MAKERS: dict[str, Callable[[Floats], Bytes]] = {
    "q4_0": _q4_0,
    "q4_1": _q4_1,
    "q5_0": _q5_0,
    "q5_1": _q5_1,
    "q8_0": _q8_0,
    "mxfp4": _mxfp4,
}
