"""The interface of the native library: Python's structures and constants are those of the C++
side."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from enum import IntEnum

import numpy as np
import pytest

from sdk.kernels import cpu
from sdk.kernels.backend import Problem
from sdk.kernels.cpu import (
    elementwise,
    library,
    packed_scales,
    packed_weight,
    page_args,
    pages,
    round_args,
    runtime,
    scheme_linear,
    states,
)
from sdk.kernels.kv import tiers as kv_tiers
from sdk.kernels.kv.kv_types import KV_TYPES
from sdk.kernels.operators import mlp_activations, sampling, state_ops
from sdk.kernels.operators.route_rule import GATES, MAX_SCORED
from sdk.kernels.operators.state_ops import RATES

#: Python's structures whose C++ names differ.
NAMES = {"WeightView": "Weight", "SchemeView": "ActivationScheme"}

STRUCTURES = [
    structure
    for module in (library, page_args, round_args)
    for structure in vars(module).values()
    if isinstance(structure, type)
    and issubclass(structure, ctypes.Structure)
    and structure is not ctypes.Structure
    and structure.__module__ == module.__name__
]


class Entry(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("value", ctypes.c_int64)]


@pytest.fixture(scope="module")
def table() -> dict[str, int]:
    """Sizes, offsets and constants of the C++ side: ``native/abi_table.cpp``."""
    native = library.find_library()
    assert not isinstance(native, str), native
    count = ctypes.c_int64()
    read = native.embedlm_abi_table
    read.restype = ctypes.POINTER(Entry)
    entries = read(ctypes.byref(count))
    return {entries[i].name.decode(): entries[i].value for i in range(count.value)}


def layout_of(table: Mapping[str, int], name: str) -> dict[str, int]:
    """Offsets by field."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): at for key, at in table.items() if key.startswith(prefix)}


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda structure: structure.__name__)
def test_structures_have_the_layout_of_the_library(
    table: Mapping[str, int], structure: type[ctypes.Structure]
) -> None:
    name = NAMES.get(structure.__name__, structure.__name__)
    offsets = {field[0]: getattr(structure, field[0]).offset for field in structure._fields_}
    assert offsets == layout_of(table, name)
    assert ctypes.sizeof(structure) == table[name]


def test_records_of_sampling_have_the_layout_of_the_library(table: Mapping[str, int]) -> None:
    def offsets(dtype: np.dtype[np.void]) -> dict[str, int]:
        assert dtype.fields is not None
        return {name: field[1] for name, field in dtype.fields.items()}

    assert offsets(sampling.DRAW) == layout_of(table, "Draw")
    assert sampling.DRAW.itemsize == table["Draw"]
    row = {"shape": table["RowShape.shape"], "mask": table["RowShape.mask"]}
    row["words"] = table["RowShape.mask"] + table["Mask.count"]
    assert offsets(sampling._ROW) == row and sampling._ROW.itemsize == table["RowShape"]
    change, shape = sampling._ChangeRecord, sampling._ShapeRecord
    assert ctypes.sizeof(change) == table["Change"]
    assert change.ids.offset == table["Change.ids"]
    assert change.values.offset == table["Change.values"]
    assert change.count.offset == table["Change.count"]
    assert change.factors.offset == table["Change.repetition"]
    assert change.kind.offset == table["Change.kind"]
    assert ctypes.sizeof(shape) == table["Shape"]
    assert shape.words.offset == table["Shape.mask"] + table["Mask.count"]
    assert shape.changes.offset == table["Shape.changes"]
    assert shape.count.offset == table["Shape.count"]


def test_limits_are_those_of_the_library(table: Mapping[str, int]) -> None:
    assert table["kAbiVersion"] == library.ABI_VERSION
    assert table["kTileRows"] == packed_scales.TILE_ROWS
    assert table["kTileDepth"] == packed_weight.TILE_DEPTH
    assert table["kTileBytesPerBit"] == packed_weight.TILE_BYTES_PER_BIT
    assert table["kTableSize"] == packed_weight.TABLE_SIZE
    assert ctypes.sizeof(library.WeightView().int8_table) == table["kTableSize"]
    assert table["kMaxLevels"] == kv_tiers.MAX_TIERS
    assert kv_tiers.page_id(1, 0) == 1 << table["kLevelShift"]
    assert table["kMostWord"] == KV_TYPES["int16"].largest
    assert table["kBlockKeys"] == kv_tiers.TIER_PAGE_SIZE  # a page of one type is one key block
    assert len(library.LEVELS) == table["kLevelCount"]
    assert len(runtime._STATUS) + 1 == table["kStatusCount"]


def test_head_dims_up_to_the_library_s_limit_are_accepted(table: Mapping[str, int]) -> None:
    most, step = table["kMaxHeadDim"], table["kHeadDimStep"]
    assert pages.reject(Problem("attention", kv_dtype="float32", head_dim=most)) is None
    above = pages.reject(Problem("attention", kv_dtype="float32", head_dim=most + 8))
    assert above is not None and f"a multiple of {step} up to {most}" in above
    half = pages.reject(Problem("attention", kv_dtype="float32", head_dim=step // 2))
    assert half is not None and f"a multiple of {step}" in half


def camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


@pytest.mark.parametrize(
    ("enum", "prefix", "count"),
    [
        (library.OpKind, "kOp", "kOpKinds"),
        (library.Count, "k", "kCounts"),
        (sampling.ChangeKind, "k", "kChangeKinds"),
    ],
)
def test_enums_are_those_of_the_library(
    table: Mapping[str, int], enum: type[IntEnum], prefix: str, count: str
) -> None:
    for member in enum:
        assert table[prefix + camel(member.name)] == member
    assert len(enum) == table[count]


def test_numbers_of_kinds_and_types_are_those_of_the_library(table: Mapping[str, int]) -> None:
    kinds = {"kSilu": "silu", "kGeluTanh": "gelu_tanh", "kGelu": "gelu"}
    kinds |= {"kClampedSwiglu": "clamped_swiglu", "kRelu": "relu", "kRelu2": "relu2"}
    kinds["kXielu"] = "xielu"
    assert {name: elementwise._KINDS[kind] for name, kind in kinds.items()} == {
        name: table[name] for name in kinds
    }
    assert len(elementwise._KINDS) == table["kActivationKinds"]
    maps = {"kMapZero": "zeros", "kMapAdd": "add", "kMapBias": "add_bias", "kMapScale": "scale"}
    maps |= {"kMapSoftcap": "softcap", "kMapClamp": "clamp"}
    for name, kind in maps.items():
        assert elementwise.MAPS[kind] == table[name]
    assert len(elementwise.MAPS) == table["kMapKinds"]
    routes = ("kRouteSoftmax", "kRouteSigmoid", "kRouteSqrtSoftplus", "kRouteSparse")
    assert [table[name] for name in routes] == list(range(len(GATES)))
    assert table["kRouteKinds"] == len(GATES) and table["kMaxScored"] == MAX_SCORED
    functions = dict.fromkeys((*mlp_activations.GATES, *RATES))
    gates = {kind: table[f"kGate{kind.capitalize()}"] for kind in functions}
    assert gates == elementwise.GATE_KINDS and len(gates) == table["kGateKinds"]
    norms = {"silu": table["kNormSilu"], "sigmoid": table["kNormSigmoid"]}
    assert norms == states.NORM_GATES and len(norms) == table["kNormGates"]
    assert (
        table["kMaxTaps"],
        table["kMaxStateDim"],
    ) == (state_ops.MAX_TAPS, state_ops.MAX_STATE_DIM)
    types = {
        "float16": "kF16",
        "bfloat16": "kBF16",
        "float32": "kF32",
        "uint8": "kU8",
        "int8": "kI8",
        "float8_e4m3fn": "kE4M3",
        "float8_e5m2": "kE5M2",
        "float8_e8m0fnu": "kE8M0",
    }
    assert {dtype: table[name] for dtype, name in types.items()} == library.ELEMENT_TYPES
    for name in ("LOW_4", "HIGH_4", "U2", "U4", "I6"):
        assert getattr(packed_scales, name) == table[f"k{camel(name)}"]
    for name, source in packed_weight.BLOCK_SOURCES.items():
        upper = name.upper()
        assert source.number == table.get(f"k{upper}", table.get(f"k{upper.replace('_', '')}"))
    codes = {"int": "kIntCodes", "e4m3": "kE4M3Codes", "e2m1": "kE2M1Codes"}
    assert {kind: table[name] for kind, name in codes.items()} == scheme_linear._CODES
    rules = {"plain": "kPlainScale", "mx": "kMxScale", "power": "kPowerScale", "nv": "kNvScale"}
    rules["absmax"] = "kAbsmaxScale"
    assert {rule: table[name] for rule, name in rules.items()} == scheme_linear._RULES


def test_levels_are_bits_of_the_library_s_mask() -> None:
    native = library.find_library()
    assert not isinstance(native, str), native
    mask = native.embedlm_levels()
    assert mask < 1 << len(library.LEVELS)
    assert [mask >> library.LEVELS.index(level) & 1 for level in cpu.levels()] == [1] * len(
        cpu.levels()
    )
