"""Matrix products on packed weights: ``native/linear_int.hpp`` and ``native/linear_float.hpp``.

A weight is repacked once: 16 rows interleaved, 32 k per tile, the codes in bit planes, so that one
vector load feeds an integer dot product; scales stay in the file's own types. Every bit is kept:
``unpack`` gives the canonical tensors back. Packed bytes exceed the canonical ones by the padding
of rows to 16 and of k to 32, and where 6-bit scales become bytes: 3.6 % for q3_k, 2.8 % q4_k,
2.3 % q5_k. Scales of 8-bit floats are kept per row: 3.1 % more for blocks of 128 x 128.
"""

from __future__ import annotations

from ctypes import addressof, byref
from dataclasses import dataclass

import torch
from torch import Tensor

from sdk.kernels.cpu.elementwise import floats
from sdk.kernels.cpu.library import (
    ELEMENT_TYPES,
    EmbeddingArgs,
    Engine,
    LinearArgs,
    OpKind,
    WeightView,
    check,
)
from sdk.kernels.cpu.weight_memory import WeightMemory
from sdk.kernels.errors import KernelError
from sdk.kernels.layouts import BLOCK_TYPES, Affine, Blocks, Dense, Float8, Layout, check_layout
from sdk.kernels.reference.decode import row_scales
from sdk.kernels.registry import Problem

ROWS = 16
DEPTH = 32
#: Torch types of plain values.
_VALUES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
#: Element types that torch does not have: the halves of a byte.
_LOW_4, _HIGH_4 = 7, 8


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

    @property
    def nbytes(self) -> int:
        parts = (self.scale, self.minus, self.zeros, self.super_scale, self.super_minus)
        return self.codes.nbytes + sum(part.nbytes for part in parts if part is not None)


class Linear:
    """See :class:`sdk.kernels.registry.LinearKernel`.

    ``activation_bits`` 8: activations are rounded per 32 values (quantized weights only). 16: of
    blocks whose step is above their row's root mean square, what the rounding left is rounded and
    multiplied too. 32, and always for plain floats: everything is fp32.
    """

    def __init__(self, engine: Engine, memory: WeightMemory, activation_bits: int) -> None:
        self._engine = engine
        self._memory = memory
        self._bits = activation_bits
        self.name = {8: "cpu.linear", 16: "cpu.linear_a16", 32: "cpu.linear_exact"}[activation_bits]

    def reject(self, problem: Problem) -> str | None:
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
                return "codes that index a table"
            if not 2 <= problem.bits <= 8:
                return f"{problem.bits} bits: expected 2 to 8"
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
                return Float8(values, scale.contiguous(), facts.block)
            case Affine():
                codes = torch.zeros(facts.shape[0], -(-facts.shape[1] * facts.bits // 8)).byte()
                self._unpack_into(packed, codes, codes.shape[1])
                return _unpack_affine(packed, facts, codes)
            case Blocks():
                data = _unpack_block_scales(packed, facts)
                self._unpack_into(packed, data, data.shape[1])
                return Blocks(facts.shape, facts.type, data)

    def _unpack_into(self, packed: Packed, out: Tensor, row_bytes: int) -> None:
        status = self._engine.unpack(
            self._engine.handle, byref(packed.view), out.data_ptr(), row_bytes
        )
        check(status, "unpack")

    def matmul(self, packed: Packed, x: Tensor, out: Tensor) -> None:
        floats(x, "linear x")
        args = LinearArgs(
            w=addressof(packed.view),
            x=x.data_ptr(),
            out=out.data_ptr(),
            out_stride=out.stride(0),
            exact=self._bits == 32,
            planes=2 if self._bits == 16 and not packed.view.dense else 1,
        )
        self._engine.run(OpKind.LINEAR, args, x.shape[0], "linear")

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
        facts = Float8(facts.values, w.scale.to("meta"), w.block)
        scale = interleave(row_scales(w))
        view.groups, view.unit, view.group_units = w.scale.shape[1], 1, min(w.block[1], k)
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
    minus = None if w.minus is None else interleave(w.minus)
    zeros = None if w.zeros is None else interleave(w.zeros)
    if minus is not None:
        view.minus_type = ELEMENT_TYPES[minus.dtype]
    # new_empty and not a slice: a slice would keep the canonical tensors alive
    no_codes, no_scale = w.codes.new_empty(0, 0), w.scale.new_empty(0, 0)
    facts = Affine(w.shape, w.bits, w.group, no_codes, no_scale, zero=w.zero, signed=w.signed)
    codes = _codes(view, memory)
    packed = Packed(facts, view, codes, scale, minus, zeros)
    _point(packed)
    source = w.codes.contiguous()
    return packed, source, source.shape[1]


def _unpack_affine(packed: Packed, facts: Affine, codes: Tensor) -> Affine:
    n = facts.shape[0]
    assert packed.scale is not None
    return Affine(
        facts.shape,
        facts.bits,
        facts.group,
        codes,
        deinterleave(packed.scale, n),
        facts.zero,
        None if packed.zeros is None else deinterleave(packed.zeros, n),
        None if packed.minus is None else deinterleave(packed.minus, n),
        facts.signed,
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
    packed = Packed(facts, view, codes, scale, minus, None, super_scale, super_minus)
    _point(packed)
    if w.type == "q2_k":  # one byte holds scale and min
        view.scale_type, view.minus_type = _LOW_4, _HIGH_4
        view.minus = view.scale
    return packed, data, data.stride(0)


def _unpack_block_scales(packed: Packed, facts: Blocks) -> Tensor:
    """Rows of blocks with their scales in place and the codes' bytes zero."""
    n, k = facts.shape
    kind = BLOCK_TYPES[facts.type]
    blocks = torch.zeros(n, k // kind.elements, kind.nbytes, dtype=torch.uint8)
    assert packed.scale is not None
    if packed.super_scale is None:
        blocks[:, :, 0:2] = deinterleave(packed.scale, n).unsqueeze(2).view(torch.uint8)
        if packed.minus is not None:  # the kernels subtract what the file adds
            minimum = deinterleave(packed.minus, n).neg().unsqueeze(2)
            blocks[:, :, 2:4] = minimum.view(torch.uint8)
        return blocks.view(n, -1)
    scales = deinterleave(packed.scale, n).view(n, k // kind.elements, -1)
    d = deinterleave(packed.super_scale, n).unsqueeze(2).view(torch.uint8)
    if facts.type == "q6_k":
        blocks[:, :, 192:208] = scales
        blocks[:, :, 208:210] = d
        return blocks.view(n, -1)
    if facts.type == "q3_k":
        six = (scales + 32).view(torch.uint8)
        blocks[:, :, 96:104] = six[:, :, :8] & 15 | six[:, :, 8:] << 4
        for i in range(4):
            blocks[:, :, 104:108] |= six[:, :, 4 * i : 4 * i + 4] >> 4 << 2 * i
        blocks[:, :, 108:110] = d
        return blocks.view(n, -1)
    assert packed.super_minus is not None
    d_min = deinterleave(packed.super_minus, n).unsqueeze(2).view(torch.uint8)
    if facts.type == "q2_k":
        blocks[:, :, 0:16] = scales
        blocks[:, :, 80:84] = torch.cat((d, d_min), dim=2)
        return blocks.view(n, -1)
    assert packed.minus is not None
    mins = deinterleave(packed.minus, n).view(n, k // kind.elements, -1)
    blocks[:, :, 0:4] = torch.cat((d, d_min), dim=2)
    blocks[:, :, 4:8] = scales[:, :, :4] | (scales[:, :, 4:] >> 4 << 6)
    blocks[:, :, 8:12] = mins[:, :, :4] | (mins[:, :, 4:] >> 4 << 6)
    blocks[:, :, 12:16] = (scales[:, :, 4:] & 15) | (mins[:, :, 4:] << 4)
    return blocks.view(n, -1)


def _codes(view: WeightView, memory: WeightMemory) -> Tensor:
    """Storage of the tiles."""
    return memory.take((view.row_blocks * view.k_blocks * view.bits * 64,), torch.uint8)


def _point(packed: Packed) -> None:
    view = packed.view
    for name in ("codes", "scale", "minus", "zeros", "super_scale", "super_minus"):
        tensor = getattr(packed, name)
        setattr(view, name, None if tensor is None else tensor.data_ptr())


def interleave(x: Tensor) -> Tensor:
    """``[N, G] -> [ceil(N / 16), G, 16]``, padded with zero rows."""
    x = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[0] % ROWS))
    return x.view(-1, ROWS, x.shape[1]).transpose(1, 2).contiguous()


def deinterleave(x: Tensor, rows: int) -> Tensor:
    """The inverse of :func:`interleave`."""
    return x.transpose(1, 2).reshape(-1, x.shape[1])[:rows].contiguous()
