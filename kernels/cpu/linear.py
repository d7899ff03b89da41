"""Matrix products on packed weights: ``native/linear_int.hpp`` and ``native/linear_float.hpp``.

A weight is repacked once: 16 rows interleaved, 32 k per tile, the codes in bit planes, so that one
vector load feeds an integer dot product; scales stay in the file's own types. Every bit is kept:
``unpack`` gives the canonical tensors back. Packed bytes exceed the canonical ones by the padding
of rows to 16 and of k to 32, and where 6-bit scales become bytes: 3.6 % for q3_k, 2.8 % q4_k,
2.3 % q5_k. Scales of 8-bit floats are kept per row: 3.1 % more for blocks of 128 x 128.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array, addressof, byref, c_void_p
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sdk.kernels.cpu.elementwise import floats
from sdk.kernels.cpu.library import (
    ELEMENT_TYPES,
    EmbeddingArgs,
    Engine,
    ExpertsArgs,
    LinearArgs,
    OpKind,
    WeightView,
    check,
)
from sdk.kernels.cpu.packed_scales import ROWS, deinterleave, interleave, unpack_block_scales
from sdk.kernels.cpu.weight_memory import WeightMemory
from sdk.kernels.errors import KernelError
from sdk.kernels.experts import Routes
from sdk.kernels.layouts import (
    BLOCK_TYPES,
    TABLE_BITS,
    Affine,
    Blocks,
    Dense,
    Float8,
    Layout,
    check_layout,
)
from sdk.kernels.reference.decode import row_scales
from sdk.kernels.registry import Problem

DEPTH = 32
#: Torch types of plain values.
_VALUES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
#: Element types that torch does not have: the halves of a byte.
_LOW_4, _HIGH_4 = 7, 8
#: Added to the entries of a table of 8-bit integers, which makes them unsigned.
STEP_ZERO = 128


@dataclass(frozen=True, slots=True)
class _Source:
    """A block type as native/abi.hpp knows it; ``zero`` is subtracted from a code of ``bits``."""

    number: int
    bits: int
    zero: int = 0
    scale: torch.dtype = torch.uint8
    has_minus: bool = False


_SOURCES = {
    "q2_k": _Source(4, 2, has_minus=True),
    "q3_k": _Source(5, 3, 4, torch.int8),
    "q4_k": _Source(1, 4, has_minus=True),
    "q5_k": _Source(2, 5, has_minus=True),
    "q6_k": _Source(3, 6, 32, torch.int8),
    "q4_0": _Source(16, 4, 8, torch.float16),
    "q4_1": _Source(17, 4, 0, torch.float16, has_minus=True),
    "q5_0": _Source(18, 5, 16, torch.float16),
    "q5_1": _Source(19, 5, 0, torch.float16, has_minus=True),
    "q8_0": _Source(20, 8, 128, torch.float16),
    "iq4_nl": _Source(21, 4, STEP_ZERO, torch.float16),
    "mxfp4": _Source(22, 4, STEP_ZERO, torch.float8_e8m0fnu),
    "iq4_xs": _Source(23, 4, STEP_ZERO, torch.int8),
}


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in tiles. ``view`` points into the tensors; ``facts`` is the layout without data."""

    facts: Layout
    view: WeightView
    codes: Tensor
    scale: Tensor | None = None
    minus: Tensor | None = None
    zeros: Tensor | None = None
    super_scale: Tensor | None = None
    super_minus: Tensor | None = None
    table: Tensor | None = None

    @property
    def nbytes(self) -> int:
        parts = (self.scale, self.minus, self.zeros, self.super_scale, self.super_minus)
        return self.codes.nbytes + sum(part.nbytes for part in parts if part is not None)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The weights of a layer's experts, and where the library finds their views."""

    weights: tuple[Packed, ...]
    addresses: Array[c_void_p]


class Linear:
    """See :class:`sdk.kernels.registry.LinearKernel`.

    ``activation_bits`` 8: activations are rounded per 32 values (quantized weights only). 16: of
    blocks whose step is above their row's root mean square, what the rounding left is rounded and
    multiplied too. With either, the values of a table are 8-bit integers (``integer_steps``). 32,
    and always for plain floats: everything is fp32.
    """

    def __init__(self, engine: Engine, memory: WeightMemory, activation_bits: int) -> None:
        self._engine = engine
        self._memory = memory
        self._bits = activation_bits
        self.name = {8: "cpu.linear", 16: "cpu.linear_a16", 32: "cpu.linear_exact"}[activation_bits]

    def reject(self, problem: Problem) -> str | None:
        if problem.inputs:
            return f"the file asks for activations in {problem.inputs}"
        if self._bits < 32 and problem.compute == "exact":
            return f"rounds activations to {self._bits} bits, compute is exact"
        plain = problem.layout in ("dense", "float8")
        if self._bits < problem.activation_bits and not plain:
            return f"rounds activations to {self._bits} bits, {problem.activation_bits} are wanted"
        if problem.layout == "dense":
            if problem.format not in _VALUES:
                return f"dense {problem.format}: expected {', '.join(_VALUES)}"
        elif problem.layout == "float8":
            if problem.format not in _VALUES[3:]:
                return f"scaled {problem.format}: expected {', '.join(_VALUES[3:])}"
        elif problem.layout == "affine":
            if problem.format == "table":
                if problem.bits not in TABLE_BITS:
                    return f"a table of {problem.bits} bits: expected one of {TABLE_BITS}"
            elif not 2 <= problem.bits <= 8:
                return f"{problem.bits} bits: expected 2 to 8"
            if problem.super_group % DEPTH and problem.super_group < problem.in_features:
                return f"super group {problem.super_group}: expected a multiple of {DEPTH}"
            if problem.group % 16 and problem.group < problem.in_features:
                return f"group {problem.group}: expected a multiple of 16 or the whole row"
        elif problem.layout == "blocks":
            if problem.format not in _SOURCES:
                return f"block type {problem.format}: expected {', '.join(_SOURCES)}"
        else:
            return f"layout {problem.layout!r}: expected dense, float8, affine or blocks"
        return None

    def pack(self, layout: Layout) -> Packed:
        check_layout(layout)
        match layout:
            case Dense() | Float8():
                packed, source, row_bytes = _pack_values(layout, self._memory)
            case Affine():
                packed, source, row_bytes = _pack_affine(layout, self._memory)
            case Blocks():
                packed, source, row_bytes = _pack_blocks(layout, self._memory)
        status = self._engine.pack(
            self._engine.handle, byref(packed.view), source.data_ptr(), row_bytes
        )
        check(status, "pack")
        return packed

    def unpack(self, packed: Packed) -> Layout:
        facts = packed.facts
        match facts:
            case Dense():
                values = torch.empty(facts.shape, dtype=facts.values.dtype)
                self._unpack_into(packed, values, 0)
                return Dense(values)
            case Float8():
                values = torch.empty(facts.shape, dtype=facts.values.dtype)
                self._unpack_into(packed, values, 0)
                assert packed.scale is not None
                scale = deinterleave(packed.scale, facts.shape[0])[:: facts.block[0]]
                return replace(facts, values=values, scale=scale.contiguous())
            case Affine():
                codes = torch.zeros(facts.shape[0], -(-facts.shape[1] * facts.bits // 8)).byte()
                self._unpack_into(packed, codes, codes.shape[1])
                return _unpack_affine(packed, facts, codes)
            case Blocks():
                assert packed.scale is not None
                supers = (packed.super_scale, packed.super_minus)
                data = unpack_block_scales(facts, packed.scale, packed.minus, *supers)
                self._unpack_into(packed, data, data.shape[1])
                return Blocks(facts.shape, facts.type, data)

    def _unpack_into(self, packed: Packed, out: Tensor, row_bytes: int) -> None:
        status = self._engine.unpack(
            self._engine.handle, byref(packed.view), out.data_ptr(), row_bytes
        )
        check(status, "unpack")

    def matmul(self, packed: Packed, x: Tensor, out: Tensor) -> None:
        floats(x, "linear x")
        self._engine.run(OpKind.LINEAR, self._arguments(packed, x, out), x.shape[0], "linear")

    def group(self, packed: Sequence[Packed]) -> PackedExperts:
        weights = tuple(packed)
        addresses = (c_void_p * len(weights))(*(addressof(weight.view) for weight in weights))
        return PackedExperts(weights, addresses)

    def matmul_routed(
        self, group: PackedExperts, x: Tensor, routes: Routes, by_token: bool, out: Tensor
    ) -> None:
        floats(x, "experts x")
        each = self._arguments(group.weights[0], x, out)
        if by_token:
            each.source = routes.tokens.data_ptr()
        pointers = (addressof(group.addresses), routes.starts.data_ptr(), routes.active.data_ptr())
        args = ExpertsArgs(each, *pointers, len(group.weights), routes.weights.shape[1])
        self._engine.run(OpKind.EXPERTS, args, out.shape[0], "experts")

    def _arguments(self, packed: Packed, x: Tensor, out: Tensor) -> LinearArgs:
        return LinearArgs(
            w=addressof(packed.view),
            x=x.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            exact=self._bits == 32,
            planes=2 if self._bits == 16 and not packed.view.dense else 1,
        )

    def rows(self, packed: Packed, ids: Tensor, out: Tensor) -> None:
        if ids.dtype != torch.int64:
            raise KernelError(f"rows: expected int64 ids, found {ids.dtype}")
        args = EmbeddingArgs(addressof(packed.view), ids.data_ptr(), out.data_ptr())
        self._engine.run(OpKind.EMBEDDING, args, ids.shape[0], "rows")

    def nbytes(self, packed: Packed) -> int:
        return packed.nbytes


def _view(n: int, k: int) -> WeightView:
    view = WeightView(n=n, k=k, row_blocks=-(-n // ROWS), k_blocks=-(-k // DEPTH))
    view.unit = DEPTH
    view.group_units = view.super_units = 1
    return view


def _pack_values(w: Dense | Float8, memory: WeightMemory) -> tuple[Packed, Tensor, int]:
    n, k = w.shape
    values = w.values.contiguous()
    view = _view(n, k)
    view.dense = 1
    view.scale_type = ELEMENT_TYPES[values.dtype]
    codes = memory.take((view.row_blocks * ROWS * k,), values.dtype)
    scale = None
    facts: Dense | Float8 = Dense(values.to("meta"))
    if isinstance(w, Float8):
        facts = replace(w, values=facts.values, scale=w.scale.to("meta"))
        scale = interleave(row_scales(w))
        view.groups, view.unit, view.group_units = w.scale.shape[1], 1, min(w.block[1], k)
        view.super_type = ELEMENT_TYPES[w.scale.dtype]
    packed = Packed(facts, view, codes, scale)
    _point(packed)
    return packed, values, 0


def _pack_affine(w: Affine, memory: WeightMemory) -> tuple[Packed, Tensor, int]:
    n, k = w.shape
    view = _view(n, k)
    view.bits = w.bits
    view.flip = int(w.signed)
    view.zero = (0 if w.minus is not None else w.zero) + (128 if w.signed else 0)
    if w.group >= k:
        view.group_units = view.k_blocks
    else:
        view.unit = DEPTH if w.group % DEPTH == 0 else ROWS
        view.group_units = w.group // view.unit
    view.groups = w.scale.shape[1]
    view.scale_type = ELEMENT_TYPES[w.scale.dtype]
    scale = interleave(w.scale)
    super_scale = None
    if w.super_scale is not None:
        super_scale = interleave(w.super_scale)
        view.super_type = ELEMENT_TYPES[super_scale.dtype]
        view.supers = w.super_scale.shape[1]
        whole = w.super_group >= k  # units of padding too
        view.super_units = (view.k_blocks * DEPTH if whole else w.super_group) // view.unit
    minus = None if w.minus is None else interleave(w.minus)
    zeros = None if w.zeros is None else interleave(w.zeros)
    if minus is not None:
        view.minus_type = ELEMENT_TYPES[minus.dtype]
    # new_empty and not a slice: a slice would keep the canonical tensors alive
    facts = replace(
        w,
        codes=w.codes.new_empty(0, 0),
        scale=w.scale.new_empty(0, 0),
        zeros=None,
        minus=None,
        super_scale=None,
    )
    codes = _codes(view, memory)
    packed = Packed(
        facts, view, codes, scale, minus, zeros, super_scale, table=_tabulate(view, w.table)
    )
    _point(packed)
    source = w.codes.contiguous()
    return packed, source, source.shape[1]


def _tabulate(view: WeightView, table: Tensor | None) -> Tensor | None:
    """The table with 16 entries, and its steps: 8-bit integers of equal distance."""
    if table is None:
        return None
    view.zero = STEP_ZERO
    view.step, steps = integer_steps(table)
    for i, step in enumerate(steps):
        view.steps[i] = step + STEP_ZERO
    return torch.nn.functional.pad(table, (0, 16 - len(table))).contiguous()


def integer_steps(table: Tensor) -> tuple[float, list[int]]:
    """``table[i] ~ step * steps[i]`` with steps from -127 to 127.

    The step is the one of about 4000 with the smallest squared error. iq1 to iq4, the 4-bit floats
    of MX and NV formats and signs are multiples of a step: no error. NF4's is 2e-5 of the squared
    weights and FP4's 1e-5 (normal weights in groups of 64), where the rounding of activations costs
    1e-4 of the squared result.
    """
    values = table.double()
    peak = float(values.abs().max()) or 1.0
    inverse = torch.arange(64 * 64, 127 * 64 + 1, dtype=torch.float64).unsqueeze(1) / (64 * peak)
    error = ((values * inverse).round() / inverse - values).square().sum(1)
    best = inverse[error.argmin()]
    return 1.0 / float(best), [int(step) for step in (values * best).round()]


def _unpack_affine(packed: Packed, facts: Affine, codes: Tensor) -> Affine:
    n = facts.shape[0]
    assert packed.scale is not None
    return replace(
        facts,
        codes=codes,
        scale=deinterleave(packed.scale, n),
        zeros=None if packed.zeros is None else deinterleave(packed.zeros, n),
        minus=None if packed.minus is None else deinterleave(packed.minus, n),
        super_scale=None if packed.super_scale is None else deinterleave(packed.super_scale, n),
    )


def _pack_blocks(w: Blocks, memory: WeightMemory) -> tuple[Packed, Tensor, int]:
    """The tensors for the native code to fill, scales included."""
    n, k = w.shape
    kind, source = BLOCK_TYPES[w.type], _SOURCES[w.type]
    data = w.data if w.data.stride(1) == 1 else w.data.contiguous()
    view = _view(n, k)
    view.source, view.bits, view.zero = source.number, source.bits, source.zero
    view.flip = int(w.type == "q8_0")
    view.unit = kind.group
    view.groups = k // kind.group
    view.scale_type = view.minus_type = ELEMENT_TYPES[source.scale]

    def scales(groups: int, dtype: torch.dtype) -> Tensor:
        return memory.take((view.row_blocks, groups, ROWS), dtype)

    scale = scales(view.groups, source.scale)
    minus = super_scale = super_minus = None
    if source.has_minus and w.type != "q2_k":
        minus = scales(view.groups, source.scale)
    if kind.elements > kind.group:
        view.supers = k // kind.elements
        view.super_units = kind.elements // kind.group
        super_scale = scales(view.supers, torch.float16)
        super_minus = scales(view.supers, torch.float16) if source.has_minus else None
    facts = Blocks(w.shape, w.type, w.data.new_empty(0, 0))
    codes = _codes(view, memory)
    table = _tabulate(view, torch.tensor(kind.table, dtype=torch.float32)) if kind.table else None
    packed = Packed(facts, view, codes, scale, minus, None, super_scale, super_minus, table)
    _point(packed)
    if w.type == "q2_k":  # one byte holds scale and min
        view.scale_type, view.minus_type = _LOW_4, _HIGH_4
        view.minus = view.scale
    return packed, data, data.stride(0)


def _codes(view: WeightView, memory: WeightMemory) -> Tensor:
    """Storage of the tiles."""
    return memory.take((view.row_blocks * view.k_blocks * view.bits * 64,), torch.uint8)


def _point(packed: Packed) -> None:
    view = packed.view
    for name in ("codes", "scale", "minus", "zeros", "super_scale", "super_minus", "table"):
        tensor = getattr(packed, name)
        setattr(view, name, None if tensor is None else tensor.data_ptr())
