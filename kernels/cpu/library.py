"""Finds and checks the native library and declares its structures and functions for ctypes.

ctypes releases the interpreter lock during every call. The structures mirror ``native/abi.hpp``,
with the same field names; tests/kernels/test_native_abi.py compares sizes, offsets and constants.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_uint8,
    c_uint64,
    c_void_p,
)
from enum import IntEnum
from importlib.util import find_spec
from pathlib import Path
from zipimport import zipimporter

from sdk.kernels.cpu.library_file import foreign
from sdk.kernels.weights.expert_slots import RANKS

#: Must equal kAbiVersion in native/abi.hpp; a library with another version is rejected as stale.
ABI_VERSION = 48

#: Instruction-set levels, worst to best of each architecture, in the order of native/levels.hpp.
LEVELS = (
    *("portable", "avx2", "avx2_vnni", "avx512_vnni", "avx512_bf16"),
    *("neon", "neon_dotprod", "neon_i8mm"),
)

#: Element types, with the numbers of native/abi.hpp.
ELEMENT_TYPES = {
    "float16": 0,
    "bfloat16": 1,
    "float32": 2,
    "uint8": 3,
    "int8": 4,
    "float8_e4m3fn": 5,
    "float8_e5m2": 6,
    "float8_e8m0fnu": 9,
}


class OpKind(IntEnum):
    """The operators, with the numbers of native/abi.hpp."""

    EMBEDDING = 0
    LINEAR = 1
    NORM = 2
    ACTIVATION = 3
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
    LOW_RANK = 18
    EXCHANGE = 19
    TRANSFER = 20
    COMBINE_RANKS = 21
    GATHER_RANKS = 22
    GATE = 23
    CONV = 24
    DELTA = 25
    SPACE = 26
    RATES = 27
    GATED_NORM = 28
    HEADS = 29
    FETCH = 30
    PLACE_ROWS = 31


class Count(IntEnum):
    """What an operator of a step runs over, with the numbers of native/abi.hpp."""

    TOKENS = 0
    OUTPUTS = 1
    REQUESTS = 2
    GATHERED = 3


class SchemeView(Structure):
    """``ActivationScheme`` of native/abi.hpp: how the weight's file quantizes activations."""

    _fields_ = [
        *((name, c_int32) for name in ("codes", "rule", "bits", "symmetric")),
        ("group", c_int64),
        *((name, c_float) for name in ("scale", "zero", "factor", "limit")),
    ]


class WeightView(Structure):
    """``Weight`` of native/abi.hpp: a packed weight as pointers and strides."""

    _fields_ = [
        *((name, c_int64) for name in ("n", "k", "row_blocks", "k_blocks")),
        *((name, c_int32) for name in ("dense", "bits", "source", "flip", "subgroup")),
        *(
            (name, c_int32)
            for name in ("subgroups_per_group", "subgroups_per_super", "scale_blocks")
        ),
        *((name, c_int32) for name in ("scale_type", "minus_type", "zeros_type")),
        *(
            ("zero", c_float),
            ("super_type", c_int32),
            ("int8_table_scale", c_float),
            ("int8_table", c_uint8 * 16),
        ),
        *((name, c_int64) for name in ("groups", "supers", "scale_rows")),
        *((name, c_void_p) for name in ("codes", "scale", "minus", "zeros", "super_scale")),
        *((name, c_void_p) for name in ("super_minus", "table", "scale_table", "scale_offset")),
        ("scheme", SchemeView),
        ("check", c_void_p),
    ]


class WeightCheck(Structure):
    """The sums of a weight in a mapped file, compared before its first use; the library writes the
    last three."""

    begin: int
    bytes: int
    next: int
    done: int
    state: int
    _fields_ = [
        ("begin", c_void_p),
        *((name, c_int64) for name in ("bytes", "piece")),
        *((name, c_void_p) for name in ("sums", "end")),
        *((name, c_int64) for name in ("next", "done")),
        ("state", c_int32),
    ]


class Activations(Structure):
    """Quantized activations, which only the library reads and writes."""

    _fields_ = [
        ("k_blocks", c_int64),
        *((name, c_void_p) for name in ("values", "blocks", "residual", "words", "bf16")),
    ]


class FilePart(Structure):
    """Packed weights in a mapped file; only the library uses ``next``."""

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
        *((name, c_int32) for name in ("exact", "terms", "rounded")),
        ("m", c_int64),
        ("act", Activations),
        *((name, c_void_p) for name in ("source", "file", "done")),
    ]


class RouteArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("logits", "bias", "factors", "chosen", "weights")),
        ("experts", c_int64),
        *((name, c_int32) for name in ("k", "gate", "normalized")),
        *((name, c_int32) for name in ("groups", "groups_used", "group_best")),
        *((name, c_float) for name in ("epsilon", "least", "scale", "reach")),
    ]


class GroupArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("chosen", "places", "tokens", "owners")),
        *((name, c_void_p) for name in ("starts", "active")),
        *((name, c_int64) for name in ("count", "rows")),
        *((name, c_void_p) for name in ("first", "ranks", "local", "servers", "load")),
        *((name, c_int32) for name in ("k", "rank")),
    ]


class ExpertsArgs(Structure):
    _fields_ = [
        ("each", LinearArgs),
        *((name, c_void_p) for name in ("experts", "starts", "active")),
        ("count", c_int64),
        *((name, c_int32) for name in ("k", "group")),
        ("cache", c_void_p),
    ]


class FetchArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("cache", "active", "starts", "chosen")),
        *((name, c_int64) for name in ("count", "rows")),
        *((name, c_int32) for name in ("k", "group")),
    ]


class ExpertCounts(Structure):
    _fields_ = [
        *((name, c_int64) for name in ("hits", "guessed", "missed", "asked_ahead")),
        *((name, c_int64) for name in ("reads", "bytes", "reading_ns", "waited_ns")),
    ]


class ExpertRanks(Structure):
    _fields_ = [
        ("tokens", c_int64),
        ("ranked", c_int64),
        ("ranks", c_int64 * (RANKS + 1)),
    ]


class HeadsArgs(Structure):
    _fields_ = [
        ("each", LinearArgs),
        ("heads", c_void_p),
        *((name, c_int64) for name in ("count", "x_token", "x_head", "out_head")),
    ]


class BiasArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "bias", "owners", "used")),
        ("width", c_int64),
    ]


class CombineArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "weights", "places", "shared", "gate", "out")),
        ("width", c_int64),
        ("k", c_int32),
    ]


class CombineRanksArgs(Structure):
    _fields_ = [
        ("own", CombineArgs),
        *((name, c_void_p) for name in ("group", "servers", "starts")),
        ("number", c_int64),
    ]


class GatherRanksArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("group", "x", "out", "starts")),
        *((name, c_int64) for name in ("width", "number")),
    ]


class EmbeddingArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("w", "ids", "out", "file")),
        *((name, c_int64) for name in ("first", "whole")),
        *((name, c_int64) for name in ("offset", "row_bytes", "width")),
        ("descriptor", c_int32),
    ]


class MapArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "other")),
        ("width", c_int64),
        ("factor", c_float),
        ("kind", c_int32),
    ]


class GateArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "gate")),
        *((name, c_int64) for name in ("width", "gates", "gate_stride")),
        ("kind", c_int32),
    ]


class AnglesArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("positions", "inv_freq", "cos", "sin", "axes")),
        ("shifts", c_void_p),
        *((name, c_int64) for name in ("half", "axis_stride", "shift_stride")),
        ("factor", c_float),
    ]


class PlaceRowsArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "rows", "index")),
        *((name, c_int64) for name in ("width", "row_stride", "size")),
        ("add", c_int32),
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
        *((name, c_void_p) for name in ("x", "residual", "weight", "bias", "out")),
        *((name, c_int64) for name in ("width", "inner", "outer_stride", "inner_stride")),
        *(("weight_stride", c_int64), ("eps", c_float), ("centred", c_int32)),
    ]


class ActivationArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "out")),
        ("width", c_int64),
        ("used", c_void_p),
        *((name, c_int32) for name in ("kind", "gated")),
        ("numbers", c_float * 4),
    ]


class SampleArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("logits", "draws", "shapes", "masks")),
        *((name, c_void_p) for name in ("tokens", "best", "probabilities")),
        *((name, c_int64) for name in ("width", "stride")),
    ]


class LowRankPart(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("a", "b", "scales")),
        *((name, c_int64) for name in ("rank", "first_block", "blocks")),
        ("scale", c_float),
        ("type", c_int32),
    ]


class LowRankSlot(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("parts", "bias")),
        *((name, c_int64) for name in ("count", "ranks")),
    ]


class LowRankArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "ids", "y", "slots", "table")),
        *((name, c_int64) for name in ("y_stride", "size", "k", "n")),
        *((name, c_void_p) for name in ("rows", "low")),
        *((name, c_int64) for name in ("low_stride", "units")),
    ]


class ExchangeArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("group", "x", "out")),
        *((name, c_int64) for name in ("own", "x_stride", "width", "out_width", "number")),
    ]


class TransferArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("link", "x")),
        *((name, c_int64) for name in ("width", "rows")),
    ]


class StateRows(Structure):
    _fields_ = [
        *(
            (name, c_void_p)
            for name in ("query_start", "initial", "save_start", "save_token", "save_slot", "state")
        ),
        *((name, c_int64) for name in ("slots", "slot_step", "tokens", "saves", "requests")),
    ]


class ConvArgs(Structure):
    _fields_ = [
        ("rows", StateRows),
        *((name, c_void_p) for name in ("x", "weight", "bias", "before", "after", "out")),
        *(
            (name, c_int64)
            for name in ("x_token", "before_token", "after_token", "out_step", "width", "chunks")
        ),
        *((name, c_int32) for name in ("taps", "silu", "several")),
    ]


class DeltaArgs(Structure):
    _fields_ = [
        ("rows", StateRows),
        *((name, c_void_p) for name in ("q", "k", "v", "decay", "beta", "out")),
        *(
            (name, c_int64)
            for name in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")
        ),
        *((name, c_int64) for name in ("decay_token", "decay_head", "beta_token", "beta_head")),
        *(
            (name, c_int32)
            for name in ("key_heads", "heads", "key_dim", "value_dim", "tiled", "by_row")
        ),
        *((name, c_int32) for name in ("normalized", "splits")),
        *((name, c_float) for name in ("eps", "scale")),
        *(
            (name, c_void_p)
            for name in ("rate", "first", "mix", "key_norm", "key_mix", "key_read", "own")
        ),
        *((name, c_int64) for name in ("rate_token", "rate_head", "first_token", "first_head")),
        *((name, c_int64) for name in ("mix_token", "mix_head")),
    ]


class SpaceArgs(Structure):
    _fields_ = [
        ("rows", StateRows),
        *((name, c_void_p) for name in ("x", "dt", "a", "b", "c", "d")),
        ("out", c_void_p),
        *(
            (name, c_int64)
            for name in ("x_token", "x_head", "dt_token", "dt_head", "b_token", "b_group")
        ),
        *((name, c_int64) for name in ("c_token", "c_group")),
        *((name, c_int32) for name in ("heads", "groups", "width", "size", "by_row", "splits")),
    ]


class RatesArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "bias", "factor", "out")),
        *((name, c_int64) for name in ("x_token", "width", "factors")),
        *((name, c_int32) for name in ("kind", "limited")),
        *((name, c_float) for name in ("low", "high")),
    ]


class GatedNormArgs(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "gate", "weight", "out")),
        *(
            (name, c_int64)
            for name in ("width", "heads", "x_token", "x_head", "gate_token", "gate_head")
        ),
        ("weight_head", c_int64),
        *((name, c_int32) for name in ("kind", "first")),
        ("eps", c_float),
    ]


_SIGNATURES = {
    "levels": (c_int, ()),
    "runtime_create": (c_void_p, (c_int, c_int)),
    "runtime_close": (None, (c_void_p,)),
    "runtime_destroy": (None, (c_void_p,)),
    "runtime_level": (c_int, (c_void_p,)),
    "pack": (c_int, (c_void_p, POINTER(WeightView), c_void_p, c_int64, c_int64, c_int64)),
    "pack_end": (None, (c_void_p,)),
    "unpack": (c_int, (c_void_p, POINTER(WeightView), c_void_p, c_int64)),
    "round": (c_int, (c_int, c_void_p)),
    "args_size": (c_int64, (c_int,)),
    "run": (c_int, (c_void_p, c_int, c_void_p, c_int64)),
    "ranks_create": (c_void_p, (c_int, c_int, c_int, c_int, c_double)),
    "ranks_join": (c_int, (c_void_p, c_char_p, c_double)),
    "ranks_gather": (c_int, (c_void_p, c_void_p, c_int64, c_void_p)),
    "ranks_reserve": (c_int, (c_void_p, c_int64)),
    "ranks_transfer": (c_int, (c_void_p, c_void_p, c_int64)),
    "ranks_waited_ns": (c_int64, (c_void_p,)),
    "ranks_give_up": (None, (c_void_p,)),
    "ranks_destroy": (None, (c_void_p,)),
    "sum": (c_uint64, (c_void_p, c_int64)),
    "check": (c_int, (POINTER(WeightCheck),)),
    "read_over": (c_int, (c_int, c_int64, c_void_p, c_int64)),
    "experts_create": (c_void_p, (c_int, c_char_p, c_int, c_int)),
    "experts_add": (c_int, (c_void_p, c_int, c_int, c_void_p, c_void_p, c_void_p, c_int64)),
    "experts_reserve": (c_int, (c_void_p, c_int, c_int64, c_int64)),
    "experts_counts": (None, (c_void_p, POINTER(ExpertCounts))),
    "experts_begin_with": (None, (c_void_p, c_int, c_void_p, c_int64)),
    "experts_preload": (c_int, (c_void_p,)),
    "experts_uses": (None, (c_void_p, c_int, c_void_p, c_int64)),
    "experts_ranks": (None, (c_void_p, POINTER(ExpertRanks))),
    "experts_stop": (None, (c_void_p,)),
    "experts_destroy": (None, (c_void_p,)),
    "program_create": (c_void_p, ()),
    "program_destroy": (None, (c_void_p,)),
    "program_add": (c_int, (c_void_p, c_int, c_void_p, c_int, c_int64)),
    "program_time": (c_int, (c_void_p, c_void_p, c_int)),
    "program_times": (None, (c_void_p, c_void_p, POINTER(c_int64))),
    "program_run": (c_int, (c_void_p, c_void_p, POINTER(c_int64))),
}


def load_library(path: str) -> ctypes.CDLL | str:
    """The library at ``path`` with its functions declared, or the reason why it cannot be used."""
    try:
        if why := foreign(Path(path)):
            return why
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
    if not library.embedlm_levels():
        return f"native module was compiled for another CPU alone ({path}): run `make build`"
    return library


def find_library() -> ctypes.CDLL | str:
    """The native library of this installation, or one line that says why there is none.

    The import system finds it in all three cases: in a wheel, redirected by an editable install,
    and next to this file in a checkout after ``make build``.
    """
    spec = find_spec("sdk.kernels.cpu._native")
    if spec is None or spec.origin is None:
        return _why_missing()
    return load_library(spec.origin)


def _why_missing() -> str:
    loader = getattr(__spec__, "loader", None)
    if isinstance(loader, zipimporter):
        return (
            f"no native module: the system cannot load a library from inside {loader.archive}; "
            "unpack it, or install embedlm with pip"
        )
    for found in Path(__file__).parent.glob("_native.*"):
        if why := foreign(found):  # Windows looks for .pyd, others for .so
            return why
    if Path(__file__).with_name("native").is_dir():  # the C++ sources: a checkout
        return (
            "native module not built: install a C++ compiler and run `make build`; "
            "`pip install -v --no-deps -e .` shows why one fails"
        )
    return (
        "native module missing: it did not compile when embedlm was installed. Install a C++ "
        "compiler (Debian, Ubuntu: apt install g++), then embedlm from source: `pip install -v "
        "--force-reinstall --no-deps --no-cache-dir SOURCE`, its folder or git+https address; "
        "-v shows why a compiler fails"
    )


def levels() -> tuple[str, ...]:
    """The instruction-set levels that run on this CPU, worst first; empty without the library."""
    library = find_library()
    if isinstance(library, str):
        return ()
    mask = library.embedlm_levels()
    return tuple(name for i, name in enumerate(LEVELS) if mask >> i & 1)
