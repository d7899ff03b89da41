"""The native library: found, checked, its structures and functions declared once for ctypes.

ctypes releases the interpreter lock during every call. The structures mirror ``native/abi.hpp``.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from importlib.util import find_spec

import torch

from sdk.kernels.errors import KernelError

#: Must equal kAbiVersion in native/abi.hpp; a library with another one is refused as stale.
ABI_VERSION = 3

#: Instruction-set levels, worst to best, in the order of native/levels.hpp.
LEVELS = ("portable", "avx2", "avx2_vnni", "avx512_vnni")

#: Element types as native/abi.hpp numbers them.
ELEMENT_TYPES = {
    torch.float16: 0,
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.uint8: 3,
    torch.int8: 4,
}

_STATUS = {
    1: "out of memory",
    2: "the engine is closed",
    3: "a page id, slot or length lies outside of its tensor",
}


class WeightView(Structure):
    """``Weight`` of native/abi.hpp: a packed weight as pointers and strides."""

    _fields_ = [
        *((name, c_int64) for name in ("n", "k", "row_blocks", "k_blocks")),
        *((name, c_int32) for name in ("dense", "bits", "source", "flip", "unit")),
        *((name, c_int32) for name in ("group_units", "super_units", "scale_type", "minus_type")),
        ("zero", c_float),
        ("groups", c_int64),
        ("supers", c_int64),
        *((name, c_void_p) for name in ("codes", "scale", "minus", "zeros")),
        *((name, c_void_p) for name in ("super_scale", "super_minus")),
    ]


class NormArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "residual", "weight", "out")),
        ("width", c_int64),
        ("eps", c_float),
    ]


class GatedArgs(Structure):
    _fields_ = [("gate_up", c_void_p), ("out", c_void_p), ("width", c_int64), ("kind", c_int32)]


class AnglesArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("positions", "inv_freq", "cos", "sin")),
        ("half", c_int64),
        ("factor", c_float),
    ]


class RopeArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("q", "k", "v", "cos", "sin", "slots")),
        *((name, c_void_p) for name in ("k_pages", "v_pages", "k_scales", "v_scales")),
        *((name, c_int64) for name in ("q_token", "q_head", "k_token", "k_head")),
        *((name, c_int64) for name in ("v_token", "v_head", "cos_token", "sin_token")),
        *((name, c_int64) for name in ("k_page", "k_page_head", "k_page_dim")),
        *((name, c_int64) for name in ("v_page", "v_page_head", "v_page_slot")),
        *((name, c_int64) for name in ("scale_page", "scale_head", "num_pages")),
        *((name, c_int32) for name in ("heads", "kv_heads", "head_dim", "half")),
        *((name, c_int32) for name in ("page_size", "page_type")),
    ]


class AttentionArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("q", "out", "k_pages", "v_pages", "k_scales", "v_scales")),
        *((name, c_void_p) for name in ("query_start", "context_len", "page_table")),
        *((name, c_void_p) for name in ("sinks", "shared")),
        *((name, c_int64) for name in ("q_token", "q_head", "table_width")),
        *((name, c_int64) for name in ("k_page", "k_page_head", "k_page_dim")),
        *((name, c_int64) for name in ("v_page", "v_page_head", "v_page_slot")),
        *((name, c_int64) for name in ("scale_page", "scale_head", "num_pages", "tokens")),
        ("window", c_int64),
        *((name, c_int32) for name in ("requests", "heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("page_size", "page_type")),
        ("scale", c_float),
        ("softcap", c_float),
        ("query_tile", c_int32),
        ("run_chunks", c_int32),
    ]


_SIGNATURES = {
    "levels": (c_int, ()),
    "engine_create": (c_void_p, (c_int, c_int)),
    "engine_destroy": (None, (c_void_p,)),
    "engine_level": (c_int, (c_void_p,)),
    "pack": (c_int, (c_void_p, POINTER(WeightView), c_void_p, c_int64)),
    "unpack": (c_int, (c_void_p, POINTER(WeightView), c_void_p, c_int64)),
    "rows": (c_int, (c_void_p, POINTER(WeightView), c_void_p, c_int64, c_void_p)),
    "linear": (c_int, (c_void_p, POINTER(WeightView), c_void_p, c_int64, c_void_p, c_int)),
    "rms_norm": (c_int, (c_void_p, POINTER(NormArgs), c_int64)),
    "gated": (c_int, (c_void_p, POINTER(GatedArgs), c_int64)),
    "rope": (c_int, (c_void_p, POINTER(RopeArgs), c_int64)),
    "rope_angles": (c_int, (c_void_p, POINTER(AnglesArgs), c_int64)),
    "attention": (c_int, (c_void_p, POINTER(AttentionArgs))),
}


def load_library(path: str) -> ctypes.CDLL | str:
    """The library at ``path`` with its functions declared, or why it cannot be used."""
    try:
        library = ctypes.CDLL(path)
        version = library.embedlm_abi_version()
    except (OSError, AttributeError) as error:
        return f"native module cannot be loaded: {error}"
    if version != ABI_VERSION:
        return (
            f"native module is stale: interface {version} in {path}, expected {ABI_VERSION}: "
            "run `make build`"
        )
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, f"embedlm_{name}")
        function.restype = result
        function.argtypes = arguments
    return library


def find_library() -> ctypes.CDLL | str:
    """The native library of this installation, or one line that says why there is none.

    The import system knows where it is in all three cases: in the wheel, redirected by an editable
    install, beside this file in a checkout after ``make build``.
    """
    spec = find_spec("sdk.kernels.cpu._native")
    if spec is None or spec.origin is None:
        return "native module not built: run `make build` (needs a C++ compiler)"
    return load_library(spec.origin)


def levels() -> tuple[str, ...]:
    """The instruction-set levels that run on this CPU, worst first; empty without the library."""
    library = find_library()
    if isinstance(library, str):
        return ()
    mask = library.embedlm_levels()
    return tuple(name for i, name in enumerate(LEVELS) if mask >> i & 1)


class Engine:
    """Threads, scratch memory and instruction-set level of one ``Ops``. Thread-safe.

    :raises KernelError: without the library, or when ``level`` does not run on this CPU.
    """

    def __init__(self, num_threads: int, level: str | None = None) -> None:
        library = find_library()
        if isinstance(library, str):
            raise KernelError(library)
        if level is not None and level not in levels():
            raise KernelError(f"SIMD level: expected one of {levels()}, found {level!r}")
        index = -1 if level is None else LEVELS.index(level)
        handle = library.embedlm_engine_create(num_threads, index)
        if not handle:
            raise KernelError(f"no engine of {num_threads} threads: out of memory")
        self.handle: int = handle
        self.level = LEVELS[library.embedlm_engine_level(handle)]
        self.pack = library.embedlm_pack
        self.unpack = library.embedlm_unpack
        self.rows = library.embedlm_rows
        self.linear = library.embedlm_linear
        self.rms_norm = library.embedlm_rms_norm
        self.gated = library.embedlm_gated
        self.rope = library.embedlm_rope
        self.rope_angles = library.embedlm_rope_angles
        self.attention = library.embedlm_attention
        self._release = weakref.finalize(self, library.embedlm_engine_destroy, handle)

    def close(self) -> None:
        """Stop the threads and free the scratch memory. Idempotent."""
        self.handle = 0
        self._release()


def check(status: int, op: str) -> None:
    """:raises KernelError: when a native call reports anything but success."""
    if status:
        raise KernelError(f"{op}: {_STATUS[status]}")
