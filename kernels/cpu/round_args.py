"""The arguments of rounding: ``native/abi_rounding.hpp``."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p


class RoundArgs(Structure):
    largest: float
    bad: int
    _fields_ = [
        *((name, c_void_p) for name in ("x", "codes", "scale", "zero")),
        *((name, c_int64) for name in ("rows", "k", "group", "height", "row_bytes")),
        *((name, c_int32) for name in ("method", "type", "bits", "symmetric")),
        *((name, c_float) for name in ("factor", "largest")),
        ("bad", c_int32),
    ]
