"""Numbers of host tensors in another type, also in those that numpy does not know."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.host.dtypes import DTYPES, HostDtype
from sdk.kernels.host.torch_import import torch_module

_Array = NDArray[Any]
#: numpy 1 would make 0-dimensional arrays and Python's numbers int64.
_HALF_WORD, _ONE = np.uint32(16), np.uint32(1)


def converted(array: _Array, own: HostDtype | None, wanted: HostDtype) -> _Array:
    """The numbers of an array in another type; ``own``: theirs, ``None`` for numpy's."""
    if own is wanted:
        return array
    if own is not None and not own.computes:
        array = _bfloat16_values(array) if own.name == "bfloat16" else _byte_values(own.name)[array]
    if wanted.computes:
        with np.errstate(over="ignore", invalid="ignore"):  # torch does not warn either
            return array.astype(wanted.storage, copy=False)
    if wanted.name == "bfloat16":
        return _bfloat16_bits(array.astype(np.float32))
    torch = torch_module(f"a conversion to {wanted.name}")
    values = torch.from_numpy(np.ascontiguousarray(array, np.float32))
    codes: _Array = values.to(getattr(torch, wanted.name)).view(torch.uint8).numpy()
    return codes


def plain(array: _Array, own: HostDtype) -> _Array:
    """An array that numpy computes with."""
    return array if own.computes else converted(array, own, DTYPES["float32"])


def _bfloat16_values(bits: _Array) -> _Array:
    return np.asarray(bits.astype(np.uint32) << _HALF_WORD).view(np.float32)


def _bfloat16_bits(x: _Array) -> _Array:
    """Rounded to nearest, ties to even."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> _HALF_WORD) & _ONE)) >> _HALF_WORD
    found: _Array = np.where(np.isnan(x), np.uint32(0x7FC0), rounded).astype(np.uint16)
    return found


@cache
def _byte_values(name: str) -> _Array:
    """The float32 values of all codes of a type of 8 bits. Sources: OCP 8-bit floating point
    specification (e4m3, e5m2), OCP microscaling formats (e8m0)."""
    if name == "float8_e8m0fnu":
        values = [2.0 ** (code - 127) for code in range(255)] + [math.nan]
        return np.array(values, np.float64).astype(np.float32)
    if name not in ("float8_e4m3fn", "float8_e5m2"):
        torch = torch_module(f"a conversion from {name}")
        codes = torch.arange(256, dtype=torch.uint8)
        found: _Array = codes.view(getattr(torch, name)).float().numpy()
        return found
    mantissa, bias = (3, 7) if name == "float8_e4m3fn" else (2, 15)
    values = []
    for code in range(256):
        exponent, fraction = (code & 127) >> mantissa, code & ((1 << mantissa) - 1)
        if name == "float8_e4m3fn" and code & 127 == 127:
            value = math.nan
        elif name == "float8_e5m2" and exponent == 31:
            value = math.nan if fraction else math.inf
        elif exponent:
            value = (1 + fraction / (1 << mantissa)) * 2.0 ** (exponent - bias)
        else:
            value = fraction / (1 << mantissa) * 2.0 ** (1 - bias)
        values.append(-value if code & 128 else value)
    return np.array(values, np.float32)
