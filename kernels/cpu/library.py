"""The native library: found, checked, its structures and functions declared once for ctypes.

ctypes releases the interpreter lock during every call. The structures mirror ``native/abi.hpp``.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int32, c_int64, c_uint8, c_void_p
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from zipimport import zipimporter

import torch

from sdk.kernels.errors import KernelError

#: Must equal kAbiVersion in native/abi.hpp; a library with another one is refused as stale.
ABI_VERSION = 15

#: Instruction-set levels, worst to best, in the order of native/levels.hpp.
LEVELS = ("portable", "avx2", "avx2_vnni", "avx512_vnni")

#: Element types as native/abi.hpp numbers them.
ELEMENT_TYPES = {
    torch.float16: 0,
    torch.bfloat16: 1,
    torch.float32: 2,
    torch.uint8: 3,
    torch.int8: 4,
    torch.float8_e4m3fn: 5,
    torch.float8_e5m2: 6,
    torch.float8_e8m0fnu: 9,
}

_STATUS = {
    1: "out of memory",
    2: "the engine is closed",
    3: "no such operator",
    4: "a token or page id, row, slot or length lies outside of its tensor",
}


class OpKind(IntEnum):
    """The operators as native/abi.hpp numbers them."""

    EMBEDDING = 0
    LINEAR = 1
    NORM = 2
    GATED = 3
    MAP = 4
    ANGLES = 5
    SELECT = 6
    ROPE = 7
    ATTENTION = 8
    PLACES = 9
    SAMPLE = 10
    TAKE = 11
    ROUTE = 12
    GROUP = 13
    EXPERTS = 14
    BIAS = 15
    COMBINE = 16
    RECODE = 17


class Count(IntEnum):
    """What of a step an operator runs over, as native/abi.hpp numbers them."""

    TOKENS = 0
    OUTPUTS = 1
    REQUESTS = 2


class Inputs(Structure):
    """How the file of a weight wants its inputs rounded."""

    _fields_ = [
        *((name, c_int32) for name in ("codes", "rule", "bits", "symmetric")),
        ("group", c_int64),
        *((name, c_float) for name in ("scale", "zero", "factor", "limit")),
    ]


class WeightView(Structure):
    """``Weight`` of native/abi.hpp: a packed weight as pointers and strides."""

    _fields_ = [
        *((name, c_int64) for name in ("n", "k", "row_blocks", "k_blocks")),
        *((name, c_int32) for name in ("dense", "bits", "source", "flip", "unit")),
        *((name, c_int32) for name in ("group_units", "super_units", "scale_blocks")),
        *((name, c_int32) for name in ("scale_type", "minus_type", "zeros_type")),
        *(("zero", c_float), ("super_type", c_int32), ("step", c_float), ("steps", c_uint8 * 16)),
        *((name, c_int64) for name in ("groups", "supers", "scale_rows")),
        *((name, c_void_p) for name in ("codes", "scale", "minus", "zeros", "super_scale")),
        *((name, c_void_p) for name in ("super_minus", "table", "scale_table", "scale_offset")),
        ("inputs", Inputs),
    ]


class Activations(Structure):
    """Rounded activations: the library's own business."""

    _fields_ = [("k_blocks", c_int64), *((n, c_void_p) for n in ("values", "blocks", "rest"))]


class FilePart(Structure):
    """Packed weights in a mapped file: ``next`` belongs to the library."""

    begin: int
    bytes: int
    _fields_ = [
        ("begin", c_void_p),
        *((name, c_int64) for name in ("bytes", "whole")),
        ("next", c_void_p),
    ]


class LinearArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("w", "x", "out")),
        ("out_stride", c_int64),
        *((name, c_int32) for name in ("exact", "planes")),
        ("m", c_int64),
        ("act", Activations),
        *((name, c_void_p) for name in ("source", "file", "done")),
    ]


class RouteArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("logits", "chosen", "weights")),
        ("experts", c_int64),
        *((name, c_int32) for name in ("k", "normalized")),
    ]


class GroupArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("chosen", "places", "tokens", "owners")),
        *((name, c_void_p) for name in ("starts", "active")),
        *((name, c_int64) for name in ("count", "rows")),
        ("k", c_int32),
    ]


class ExpertsArgs(Structure):
    _fields_ = [
        ("each", LinearArgs),
        *((name, c_void_p) for name in ("experts", "starts", "active")),
        ("count", c_int64),
        ("k", c_int32),
    ]


class BiasArgs(Structure):
    _fields_ = [*((name, c_void_p) for name in ("x", "bias", "owners")), ("width", c_int64)]


class CombineArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "weights", "places", "out")),
        ("width", c_int64),
        ("k", c_int32),
    ]


class EmbeddingArgs(Structure):
    _fields_ = [(name, c_void_p) for name in ("w", "ids", "out", "file")]


class MapArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "other")),
        ("width", c_int64),
        ("factor", c_float),
        ("kind", c_int32),
    ]


class AnglesArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("positions", "inv_freq", "cos", "sin")),
        ("half", c_int64),
        ("factor", c_float),
    ]


class SelectArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "rows", "out")),
        *((name, c_int64) for name in ("width", "size")),
    ]


class TakeArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "order", "out")),
        ("width", c_int64),
        ("back", c_int32),
    ]


class PlacesArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("query_start", "context_len", "page_table")),
        *((name, c_void_p) for name in ("positions", "slots")),
        *((name, c_int64) for name in ("table_width", "tokens")),
        ("page_size", c_int32),
    ]


class NormArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "residual", "weight", "out")),
        *((name, c_int64) for name in ("width", "inner", "outer_stride", "inner_stride")),
        ("eps", c_float),
    ]


class GatedArgs(Structure):
    _fields_ = [("gate_up", c_void_p), ("out", c_void_p), ("width", c_int64), ("kind", c_int32)]


class SampleArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("logits", "draws", "shapes")),
        *((name, c_void_p) for name in ("tokens", "best", "probabilities")),
        *((name, c_int64) for name in ("width", "stride")),
    ]


_SIGNATURES = {
    "levels": (c_int, ()),
    "engine_create": (c_void_p, (c_int, c_int)),
    "engine_close": (None, (c_void_p,)),
    "engine_destroy": (None, (c_void_p,)),
    "engine_level": (c_int, (c_void_p,)),
    "pack": (c_int, (c_void_p, POINTER(WeightView), c_void_p, c_int64)),
    "unpack": (c_int, (c_void_p, POINTER(WeightView), c_void_p, c_int64)),
    "args_size": (c_int64, (c_int,)),
    "run": (c_int, (c_void_p, c_int, c_void_p, c_int64)),
    "program_create": (c_void_p, ()),
    "program_destroy": (None, (c_void_p,)),
    "program_add": (c_int, (c_void_p, c_int, c_void_p, c_int, c_int64)),
    "program_run": (c_int, (c_void_p, c_void_p, POINTER(c_int64))),
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
        return _why_missing()
    return load_library(spec.origin)


def _why_missing() -> str:
    loader = getattr(__spec__, "loader", None)
    if isinstance(loader, zipimporter):
        return (
            f"no native module: the system loads no library from inside {loader.archive}; "
            "unpack it, or install embedlm with pip"
        )
    if Path(__file__).with_name("native").is_dir():  # the C++ sources: a checkout
        return "native module not built: install a C++ compiler and run `make build`"
    return (
        "native module missing: embedlm was installed without a C++ compiler. Install one "
        "(Debian, Ubuntu: apt install g++), then embedlm from source: `pip install "
        "--force-reinstall --no-deps --no-cache-dir SOURCE`, its folder or git+https address"
    )


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
        self.library = library
        self.recording: Program | None = None
        self._run = library.embedlm_run
        # Only what nothing refers to any more is destroyed, and nothing at exit: another thread,
        # a daemon even then, may be in a call.
        weakref.finalize(self, library.embedlm_engine_destroy, handle).atexit = False

    def run(self, kind: OpKind, args: Structure, rows: int, what: str) -> None:
        """One operator over ``rows`` rows (attention and places: requests), now; while a program is
        being recorded, later. :raises KernelError: naming ``what``, when the library reports it.
        """
        if self.recording is not None:
            self.recording.add(kind, args, rows)
        else:
            check(self._run(self.handle, kind, byref(args), rows), what)

    def close(self) -> None:
        """Stop the threads and free the scratch memory, after the calls that run. Idempotent."""
        self.library.embedlm_engine_close(self.handle)


class Program:
    """Operators recorded for one engine, to be run in one call with any counts up to ``limits``.

    ``limits`` are the rows tensors have while recording, for tokens, outputs and requests. After a
    select everything runs over the outputs.
    """

    def __init__(self, engine: Engine, limits: tuple[int, int, int]) -> None:
        self._engine = engine
        self._limits = limits
        self._count = Count.TOKENS
        handle = engine.library.embedlm_program_create()
        if not handle:
            raise KernelError("no program: out of memory")
        self._handle: int = handle
        self._counts = (c_int64 * 3)()
        self._run = engine.library.embedlm_program_run
        weakref.finalize(self, engine.library.embedlm_program_destroy, handle).atexit = False

    def add(self, kind: OpKind, args: Structure, rows: int) -> None:
        """Called by :meth:`Engine.run`."""
        if kind is OpKind.SELECT:
            self._count = Count.OUTPUTS
        count = self._count
        if kind in (OpKind.ATTENTION, OpKind.PLACES):
            count = Count.REQUESTS
        per, rest = divmod(rows, self._limits[count])
        if rest or not per:
            raise KernelError(
                f"recording {kind.name}: expected a multiple of {self._limits[count]} rows, "
                f"found {rows}"
            )
        add = self._engine.library.embedlm_program_add
        check(add(self._handle, kind, byref(args), count, per), f"recording {kind.name}")

    def run(self, tokens: int, outputs: int, requests: int) -> None:
        """All operators with these counts. :raises KernelError: when the library reports it."""
        self._counts[:] = [tokens, outputs, requests]
        self.run_again()

    def run_again(self) -> None:
        """With the counts of the last run. :raises KernelError: when the library reports it."""
        if status := self._run(self._engine.handle, self._handle, self._counts):
            check(status, "step")


def check(status: int, op: str) -> None:
    """:raises KernelError: when a native call reports anything but success."""
    if status:
        raise KernelError(f"{op}: {_STATUS[status]}")
