"""Packs quantized weights in the order in which Triton kernels read them; fully reversible.

Codes of b bits are split into planes of 8, 4, 2 or 1 bits (6 = 4 + 2). A plane is int32 words
``[ceil(N / 16), K / unit, 16, words]``, so that 16 rows are one run of memory along K and a thread
loads 16 bytes. The lower half of a word holds codes of even columns, the upper half their right
neighbours in the same places. One shift and mask of a ``[rows, 16]`` tile gives a slice of 32
columns (of 8 words and 16 columns if those have one scale), two in each register. Words are in the
order in which matrix instructions need their columns: :func:`columns_of_words`.

Scales keep the file's types and are transposed to ``[groups, N]``, so that neighbouring rows are
neighbours in memory. Extra bytes compared with the canonical layout: rows padded to 16, columns to
32, and the 6-bit scales of k-quants as bytes (q3_k 3.6 %, q4_k 2.8 %, q5_k 2.3 %).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from sdk.kernels.gpu.block_bits import (
    FIELDS,
    Bits,
    Fields,
    put,
    put_typed,
    take,
    take_typed,
)
from sdk.kernels.reference.decode import pack_codes, unpack_codes
from sdk.kernels.weights.layouts import BLOCK_TYPES, E2M1, Affine, Blocks, Float8

Packable = Affine | Blocks | Float8
Planes = tuple[Tensor, ...]
#: Rows that are stored together.
ROWS = 16
#: Codes unpacked to bytes at a time while packing, to limit scratch.
CHUNK = 1 << 22
#: Widths of the planes of a code, lowest bits first.
PLANES = {
    1: (1,),
    2: (2,),
    3: (2, 1),
    4: (4,),
    5: (4, 1),
    6: (4, 2),
    7: (4, 2, 1),
    8: (8,),
}
FLOAT8_KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
#: The first code of a kind, without its sign, that is no number or infinite.
FIRST_NAN = {"e4m3": 0x7F, "e5m2": 0x7C}
#: Types that are passed to Triton as bytes, and the names of those bytes.
_SCALE_BITS = {torch.float8_e8m0fnu: "e8m0", torch.float8_e4m3fn: "e4m3"}


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight for the kernels. ``facts`` is the layout without its data.

    ``kind``: the meaning of codes: ``int``, an index into a ``table``, or the bits of an ``e4m3``,
    ``e5m2`` or ``e2m1`` float. ``unit``: columns whose codes share words. ``scale [groups, N /
    scale_rows]`` is bytes if ``scale_bits`` names their meaning. ``minus [groups, N]`` is
    subtracted from the scaled value, ``zero`` or ``zeros`` of ``zeros_bits`` each (32: floats) from
    the code. ``tables`` is one table in every type of products. ``nested`` is the table of scales,
    to which ``offset [N]`` is added. ``nans``: some e4m3 or e5m2 code is NaN or infinite.
    ``rewritten``: every step copies the tensors from the host (``host_layers.py``), so a kernel may
    not read them before earlier ones are complete. ``launches``: arguments and constants of every
    kernel (``linear.py``), by type of tables.
    """

    facts: Packable
    kind: str
    bits: int
    unit: int
    pairs: int
    group: int
    planes: tuple[Tensor, ...]
    scale: Tensor
    scale_bits: str = ""
    scale_rows: int = 1
    zero: int = 0
    zeros: Tensor | None = None
    zeros_bits: int = 0
    minus: Tensor | None = None
    super_scale: Tensor | None = None
    super_minus: Tensor | None = None
    super_group: int = 0
    nested: Tensor | None = None
    offset: Tensor | None = None
    tables: Mapping[torch.dtype, Tensor] | None = None
    nans: bool = False
    rewritten: bool = False
    launches: dict[torch.dtype, tuple[Mapping[str, Any], Mapping[str, Any]]] = dataclasses.field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @property
    def shape(self) -> tuple[int, int]:
        return self.facts.shape

    @property
    def has_minus(self) -> bool:
        return self.minus is not None or self.scale_bits == "low4"

    @property
    def units(self) -> int:
        return self.planes[0].shape[1]

    @property
    def nbytes(self) -> int:
        parts = (*self.planes, self.scale, self.zeros, self.minus)
        parts = (*parts, self.super_scale, self.super_minus, self.nested, self.offset)
        return sum(part.nbytes for part in parts if part is not None)


def pack(layout: Packable) -> Packed:
    """Pack a layout without changing values; :func:`unpack` restores it bit for bit."""
    match layout:
        case Affine():
            return _pack_affine(layout)
        case Blocks():
            return _pack_blocks(layout)
        case Float8():
            return _pack_float8(layout)


def unpack(packed: Packed) -> Packable:
    """The inverse of :func:`pack`."""
    facts = packed.facts
    match facts:
        case Affine():
            flip = 128 if facts.signed else 0
            codes = [pack_codes(codes ^ flip, facts.bits) for _, codes in _chunks(packed)]
            return replace(
                facts,
                codes=torch.cat(codes),
                scale=packed.scale.t().contiguous().view(facts.scale.dtype),
                zeros=_unpack_zeros(packed, facts),
                minus=_turned(packed.minus),
                super_scale=_turned(packed.super_scale),
                scale_table=packed.nested,
                scale_offset=packed.offset,
            )
        case Blocks():
            return Blocks(facts.shape, facts.type, _join_blocks(packed, facts))
        case Float8():
            values = torch.cat([codes for _, codes in _chunks(packed)])
            scale = packed.scale.t().contiguous().view(facts.scale.dtype)
            return replace(facts, values=values.view(facts.values.dtype), scale=scale)


def _pack_affine(w: Affine) -> Packed:
    n, k = w.shape
    unit, planes = _empty_planes(n, k, w.bits, w.codes.device)
    pairs = pairs_of(unit, min(w.group, k), k)
    for rows in _row_slices(n, k):
        codes = unpack_codes(w.codes[rows], w.bits, k)
        _fill(planes, rows, unit, pairs, codes, w.bits, w.signed)
    kind, table = "int", w.table
    if table is not None:
        is_e2m1 = table.tolist() == list(E2M1)
        kind, table = ("e2m1", None) if is_e2m1 else ("table", table)
    zeros, zeros_bits = _pack_zeros(w)
    facts = w.without_data()
    scale, scale_bits = _scale(w.scale)
    return Packed(
        facts,
        kind,
        w.bits,
        unit,
        pairs,
        min(w.group, k),
        planes,
        scale,
        scale_bits if w.scale_table is None else "nested",
        zero=(0 if w.minus is not None else w.zero) + (128 if w.signed else 0),
        zeros=zeros,
        zeros_bits=zeros_bits,
        minus=_turned(w.minus),
        super_scale=_turned(w.super_scale),
        super_group=0 if w.super_scale is None else w.super_group,
        nested=w.scale_table,
        offset=w.scale_offset,
        tables=_tables(table),
    )


def _pack_float8(w: Float8) -> Packed:
    n, k = w.shape
    unit, planes = _empty_planes(n, k, 8, w.values.device)
    pairs = pairs_of(unit, min(w.block[1], k), k)
    kind = FLOAT8_KINDS[w.values.dtype]
    nans = torch.zeros((), dtype=torch.bool, device=w.values.device)
    for rows in _row_slices(n, k):
        codes = w.values[rows].view(torch.uint8)
        _fill(planes, rows, unit, pairs, codes, 8, False)
        nans |= ((codes & 0x7F) >= FIRST_NAN[kind]).any()
    facts = replace(w, values=w.values.to("meta"), scale=w.scale.new_empty(0, 0))
    high, wide = w.block
    return Packed(
        *(facts, kind, 8, unit, pairs, min(wide, k), planes, *_scale(w.scale)),
        scale_rows=high,
        nans=not nans.is_meta and bool(nans),
    )


def _pack_blocks(w: Blocks) -> Packed:
    n, k = w.shape
    type_, fields = BLOCK_TYPES[w.type], FIELDS[w.type]
    bits = len(fields.codes[0])
    unit, planes = _empty_planes(n, k, bits, w.data.device)
    pairs = pairs_of(unit, type_.group, k)
    count = k // type_.elements

    def made(field: Bits, dtype: torch.dtype) -> Tensor | None:
        dtype = torch.uint8 if dtype in _SCALE_BITS else dtype
        rows = count * len(field)
        return torch.empty(rows, n, dtype=dtype, device=w.data.device) if field else None

    scale = made(fields.scale, fields.scale_type)
    assert scale is not None
    minus = made(fields.minus, fields.scale_type)
    super_scale = made(fields.super_scale, torch.float16)
    super_minus = made(fields.super_minus, torch.float16)
    for rows in _row_slices(n, k):
        blocks = w.data[rows].reshape(-1, type_.nbytes)
        codes = take(blocks, fields.codes).view(-1, k)
        _fill(planes, rows, unit, pairs, codes, bits, w.type == "q8_0")
        for target, field, bias in _scales_of(fields, scale, minus, super_scale, super_minus):
            values = take_typed(blocks, field, target.dtype, bias)
            if target is minus and fields.negated:
                values = values.neg()
            target[:, rows] = values.reshape(codes.shape[0], -1).t()
    table = None
    if w.type.startswith("iq4"):
        table = torch.tensor(type_.table, dtype=torch.float32, device=w.data.device)
    return Packed(
        Blocks(w.shape, w.type, w.data.new_empty(0, 0)),
        "e2m1" if w.type == "mxfp4" else "int" if table is None else "table",
        bits,
        unit,
        pairs,
        type_.group,
        planes,
        scale,
        scale_bits="low4" if w.type == "q2_k" else _SCALE_BITS.get(fields.scale_type, ""),
        zero=fields.zero,
        minus=minus,
        super_scale=super_scale,
        super_minus=super_minus,
        super_group=type_.elements if fields.super_scale else 0,
        tables=_tables(table),
    )


def packed_bytes(kind: str, n: int, k: int) -> int:
    """``Packed.nbytes`` of a weight ``[n, k]`` in blocks of type ``kind``."""
    fields, count = FIELDS[kind], k // BLOCK_TYPES[kind].elements
    _, planes = _empty_planes(n, k, len(fields.codes[0]), torch.device("meta"))
    scales = (len(fields.scale) + len(fields.minus)) * fields.scale_type.itemsize
    scales += (len(fields.super_scale) + len(fields.super_minus)) * torch.float16.itemsize
    return sum(plane.nbytes for plane in planes) + n * count * scales


def _join_blocks(packed: Packed, facts: Blocks) -> Tensor:
    fields = FIELDS[facts.type]
    parts = []
    for rows, codes in _chunks(packed):
        if facts.type == "q8_0":
            codes = codes ^ 128
        type_ = BLOCK_TYPES[facts.type]
        blocks = codes.new_zeros(codes.numel() // type_.elements, type_.nbytes)
        put(blocks, fields.codes, codes.reshape(-1, type_.elements))
        own = (packed.scale, packed.minus, packed.super_scale, packed.super_minus)
        for tensor, field, bias in _scales_of(fields, *own):
            values = tensor[:, rows].t().reshape(blocks.shape[0], -1)
            if tensor is packed.minus and fields.negated:
                values = values.neg()
            put_typed(blocks, field, values, bias)
        parts.append(blocks.view(codes.shape[0], -1))
    return torch.cat(parts)


def _scales_of(
    fields: Fields,
    scale: Tensor,
    minus: Tensor | None,
    super_scale: Tensor | None,
    super_minus: Tensor | None,
) -> Iterator[tuple[Tensor, Bits, int]]:
    """The scale tensors of a block type, their positions in a block, and their bias."""
    yield scale, fields.scale, fields.bias
    for tensor, field in (
        (minus, fields.minus),
        (super_scale, fields.super_scale),
        (super_minus, fields.super_minus),
    ):
        if tensor is not None:
            yield tensor, field, 0


def _turned(part: Tensor | None) -> Tensor | None:
    """Transpose groups and rows; tensors that continue over row ends are not changed."""
    return part if part is None or part.dim() == 1 else part.t().contiguous()


def _tables(table: Tensor | None) -> Mapping[torch.dtype, Tensor] | None:
    types = (torch.float32, torch.float16, torch.bfloat16)
    return None if table is None else {dtype: table.to(dtype) for dtype in types}


def _pack_zeros(w: Affine) -> tuple[Tensor | None, int]:
    """Zero points ``[groups, N]``: floats, or bytes unless those cost over 2.9 % of the weight.

    Otherwise several to a byte along the groups; kernels then convert decoded weights through
    shared memory (sm_90: 20 stores and 8 loads per 64 x 128 weights instead of 8 loads).
    """
    if w.zeros is None:
        return None, 0
    if w.zeros.is_floating_point():
        return _turned(w.zeros), 32
    bits = 8
    if 8 - w.bits > 0.029 * (w.bits * w.group + 8 * w.scale.itemsize + w.bits):
        bits = next(bits for bits in (2, 4, 8) if bits >= w.bits)
    zeros = unpack_codes(w.zeros, w.bits, w.scale.shape[1])
    return pack_codes(zeros, bits).t().contiguous(), bits


def _unpack_zeros(packed: Packed, facts: Affine) -> Tensor | None:
    if packed.zeros is None or packed.zeros_bits == 32:
        return _turned(packed.zeros)
    groups = -(-packed.shape[1] // packed.group)
    zeros = unpack_codes(packed.zeros.t().contiguous(), packed.zeros_bits, groups)
    return pack_codes(zeros, facts.bits)


def _scale(scale: Tensor) -> tuple[Tensor, str]:
    """Transposed scales, as bytes if Triton does not support their type, and the bytes' meaning."""
    meaning = _SCALE_BITS.get(scale.dtype, "")
    return (scale.view(torch.uint8) if meaning else scale).t().contiguous(), meaning


def _empty_planes(n: int, k: int, bits: int, device: torch.device) -> tuple[int, Planes]:
    """The number of columns that share words, and memory for the words.

    16 words of the lowest plane if K allows it, otherwise fewer, to avoid padding K.
    """
    unit = 512 // PLANES[bits][0]
    while k % unit and unit > 32:
        unit //= 2
    shape = (-(-n // ROWS), -(-k // unit), ROWS)
    return unit, tuple(
        torch.empty(*shape, unit * width // 32, dtype=torch.int32, device=device)
        for width in PLANES[bits]
    )


def _row_slices(n: int, k: int) -> Iterator[slice]:
    step = max(ROWS, CHUNK // k // ROWS * ROWS)
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def pairs_of(unit: int, group: int, k: int) -> int:
    """Words of a slice of columns, which has one scale: 16, or 8 if groups have 16 columns."""
    return 16 if group >= k or math.gcd(unit, group) % 32 == 0 else 8


def columns_of_words(unit: int, width: int, pairs: int, device: torch.device) -> Tensor:
    """The column of a unit at each place of its words: ``[halves, fields, words]``.

    In an operand of a matrix instruction thread t of 4 has the column pairs t, t + 4, t + 8, ...
    (NVIDIA's PTX manual, fragments of mma.m16n8k16): those are neighbouring words here.
    """
    words = unit * width // 32
    half, field, word = torch.meshgrid(
        torch.arange(2), torch.arange(16 // width), torch.arange(words), indexing="ij"
    )
    if words >= pairs:
        slices, lane = field * (words // pairs) + word // pairs, word % pairs
    else:
        slices, lane = field // (pairs // words), field % (pairs // words) * words + word
    each = pairs // 4
    pair = lane % each * 4 + lane // each
    return (2 * pairs * slices + 2 * pair + half).to(device)


def _fill(
    planes: Planes, rows: slice, unit: int, pairs: int, codes: Tensor, bits: int, signed: bool
) -> None:
    """Pack the codes uint8 ``[R, K]`` of some rows into their words."""
    if signed:  # two's complement becomes an offset of 128
        codes = codes ^ 128
    count, k = codes.shape
    pad = (0, -k % unit, 0, -count % ROWS)
    codes = torch.nn.functional.pad(codes, pad).view(-1, ROWS, -(-k // unit), unit).transpose(1, 2)
    first, shift = rows.start // ROWS, 0
    for plane, width in zip(planes, PLANES[bits], strict=True):
        part = (codes >> shift) & ((1 << width) - 1)
        order = columns_of_words(unit, width, pairs, codes.device)
        part = part[:, :, :, order]
        words = torch.zeros(*codes.shape[:3], order.shape[2], dtype=torch.int32, device=part.device)
        for half, i in product(range(2), range(16 // width)):
            words |= part[:, :, :, half, i].to(torch.int32) << (16 * half + i * width)
        plane[first : first + words.shape[0]] = words
        shift += width


def _chunks(packed: Packed) -> Iterator[tuple[slice, Tensor]]:
    """Slices of rows with their unpacked codes: uint8 ``[R, K]``."""
    n, k = packed.shape
    for rows in _row_slices(n, k):
        blocks = slice(rows.start // ROWS, -(-rows.stop // ROWS))
        whole, shift = None, 0
        for plane, width in zip(packed.planes, PLANES[packed.bits], strict=True):
            words, mask = plane[blocks], (1 << width) - 1
            fields = torch.stack([words >> i & mask for i in range(0, 32, width)], dim=3)
            order = columns_of_words(packed.unit, width, packed.pairs, words.device)
            part = torch.empty(
                *words.shape[:3], packed.unit, dtype=torch.uint8, device=words.device
            )
            part[:, :, :, order.flatten()] = fields.flatten(3).to(torch.uint8) << shift
            whole = part if whole is None else whole | part
            shift += width
        assert whole is not None
        codes = whole.transpose(1, 2).reshape(-1, packed.units * packed.unit)
        yield rows, codes[: rows.stop - rows.start, :k]
