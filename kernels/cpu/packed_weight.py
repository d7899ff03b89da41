"""Packs weights for the native kernels, as tiles of codes with interleaved scales, and unpacks
them.

A weight is packed once: 16 rows interleaved, 32 k per tile, the codes in bit planes, so that one
vector load feeds an integer dot product; scales keep the types of the file. Packing is lossless:
``canonical`` restores the tensors of the file. Packed weights are larger by the padding of rows to
16 and of k to 32, and where 6-bit scales become bytes: 2.8 % for q4_k, 2.3 % for q5_k.
"""

from __future__ import annotations

from dataclasses import replace

from sdk.kernels.cpu.library import ELEMENT_TYPES, FilePart, WeightCheck, WeightView
from sdk.kernels.cpu.packed_scales import (
    HIGH_4,
    I6,
    LOW_4,
    TILE_ROWS,
    deinterleave,
    interleave,
    pack_zeros,
    turn,
    unpack_block_scales,
    unpack_columns,
    unpack_zeros,
)
from sdk.kernels.cpu.weight_memory import WeightMemory
from sdk.kernels.dataclass import dataclass
from sdk.kernels.lazy_torch import Tensor, torch, type_name
from sdk.kernels.reference.decode import row_scales
from sdk.kernels.weights.layouts import BLOCK_TYPES, Affine, Blocks, Dense, Float8, Layout

#: Columns (k) of a tile: kTileDepth of native/abi.hpp.
TILE_DEPTH = 32
#: Bytes of a tile per bit of its codes: kTileBytesPerBit.
TILE_BYTES_PER_BIT = TILE_ROWS * TILE_DEPTH // 8
#: Entries of a packed table: kTableSize.
TABLE_SIZE = 16
#: Added to the entries of a table of 8-bit integers to make them unsigned.
INT8_TABLE_ZERO = 128


@dataclass(frozen=True, slots=True)
class _Source:
    """A block type with its number in native/abi.hpp; ``zero`` is subtracted from a code of
    ``bits``."""

    number: int
    bits: int
    zero: int = 0
    scale: str = "uint8"
    has_minus: bool = False


BLOCK_SOURCES = {
    "q2_k": _Source(4, 2, has_minus=True),
    "q3_k": _Source(5, 3, 4),
    "q4_k": _Source(1, 4, has_minus=True),
    "q5_k": _Source(2, 5, has_minus=True),
    "q6_k": _Source(3, 6, 32, "int8"),
    "q4_0": _Source(16, 4, 8, "float16"),
    "q4_1": _Source(17, 4, 0, "float16", has_minus=True),
    "q5_0": _Source(18, 5, 16, "float16"),
    "q5_1": _Source(19, 5, 0, "float16", has_minus=True),
    "q8_0": _Source(20, 8, 128, "float16"),
    "iq4_nl": _Source(21, 4, INT8_TABLE_ZERO, "float16"),
    "mxfp4": _Source(22, 4, INT8_TABLE_ZERO, "float8_e8m0fnu"),
    "iq4_xs": _Source(23, 4, INT8_TABLE_ZERO, "int8"),
}


def packed_bytes(kind: str, rows: int, columns: int) -> int:
    """``Packed.nbytes`` of a weight in blocks of type ``kind``, before it is packed."""
    block, source = BLOCK_TYPES[kind], BLOCK_SOURCES[kind]
    groups = columns // block.group
    scales = (
        12 * groups
        if kind == "q3_k"
        else TILE_ROWS * groups * getattr(torch, source.scale).itemsize
    )
    levels = 1
    if source.has_minus and kind != "q2_k":  # in q2_k one byte holds scale and minimum
        scales *= 2
    if source.has_minus:
        levels = 2
    supers = levels * 2 * TILE_ROWS * (columns // block.elements)
    if block.elements == block.group:
        supers = 0
    tiles = -(-columns // TILE_DEPTH) * source.bits * TILE_BYTES_PER_BIT
    return -(-rows // TILE_ROWS) * (tiles + scales + supers)


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in tiles. ``view`` points into the tensors; ``facts`` is the layout without data;
    ``file`` is the part of a file that holds tensors; ``kept``: the sums of those in a file of the
    cache of weights."""

    facts: Layout
    view: WeightView
    codes: Tensor
    scale: Tensor | None = None
    minus: Tensor | None = None
    zeros: Tensor | None = None
    super_scale: Tensor | None = None
    super_minus: Tensor | None = None
    table: Tensor | None = None
    scale_table: Tensor | None = None
    scale_offset: Tensor | None = None
    file: FilePart | None = None
    kept: WeightCheck | None = None

    @property
    def nbytes(self) -> int:
        levels = (self.scale, self.super_scale, self.scale_table, self.scale_offset)
        parts = (*levels, self.minus, self.super_minus, self.zeros)
        return self.codes.nbytes + sum(part.nbytes for part in parts if part is not None)


def prepared(layout: Layout, rows: int, memory: WeightMemory) -> Packed:
    """A weight of ``rows`` rows like those of a checked layout, with memory for its tiles.

    The library packs codes and values into it, see :func:`packing_source`; of ``Blocks`` the
    scales too. Other scales are packed here, so ``layout`` must have all of them.
    """
    match layout:
        case Dense() | Float8():
            return _pack_values(layout, rows, memory)
        case Affine():
            return _pack_affine(layout, memory)
        case Blocks():
            return _pack_blocks(layout, rows, memory)


def packing_source(layout: Layout) -> tuple[Tensor, int]:
    """The tensor that the library packs into tiles, and the bytes of its rows (0: plain values)."""
    match layout:
        case Dense() | Float8():
            return layout.values.contiguous(), 0
        case Affine():
            codes = layout.codes.contiguous()
            return codes, codes.shape[1]
        case Blocks():
            data = layout.data if layout.data.stride(1) == 1 else layout.data.contiguous()
            return data, data.stride(0)


def canonical(packed: Packed) -> tuple[Layout, Tensor, int]:
    """The layout without its codes or values; its tensor that the library unpacks them into, and
    the bytes of its rows.
    """
    facts = packed.facts
    match facts:
        case Dense():
            values = torch.empty(facts.shape, dtype=facts.values.dtype)
            return Dense(values), values, 0
        case Float8():
            values = torch.empty(facts.shape, dtype=facts.values.dtype)
            assert packed.scale is not None
            if packed.view.scale_blocks > 1:
                scale = packed.scale[:, :, 0]
            else:
                scale = deinterleave(packed.scale, facts.shape[0])[:: facts.block[0]]
            scale = scale.clone(memory_format=torch.contiguous_format)
            return replace(facts, values=values, scale=scale), values, 0
        case Affine():
            codes = torch.zeros(facts.shape[0], -(-facts.shape[1] * facts.bits // 8)).byte()
            return _unpack_affine(packed, facts, codes), codes, codes.shape[1]
        case Blocks():
            assert packed.scale is not None
            supers = (packed.super_scale, packed.super_minus)
            data = unpack_block_scales(facts, packed.scale, packed.minus, *supers)
            return Blocks(facts.shape, facts.type, data), data, data.shape[1]


def _view(n: int, k: int) -> WeightView:
    view = WeightView(n=n, k=k, row_blocks=-(-n // TILE_ROWS), k_blocks=-(-k // TILE_DEPTH))
    view.subgroup = TILE_DEPTH
    view.subgroups_per_group = view.subgroups_per_super = view.scale_blocks = 1
    return view


def _pack_values(w: Dense | Float8, n: int, memory: WeightMemory) -> Packed:
    k = w.shape[1]
    view = _view(n, k)
    view.dense = 1
    view.scale_type = ELEMENT_TYPES[type_name(w.values.dtype)]
    codes = memory.take((view.row_blocks * TILE_ROWS * k,), w.values.dtype)
    scale = None
    facts: Dense | Float8 = Dense(w.values[:1].to("meta").expand(n, k))
    if isinstance(w, Float8):
        facts = replace(w, values=facts.values, scale=w.scale.to("meta"))
        high = w.block[0]
        if high >= n or high % TILE_ROWS == 0:
            view.scale_blocks = min(-(-high // TILE_ROWS), view.row_blocks)
        if view.scale_blocks > 1:
            scale = w.scale.unsqueeze(2).expand(-1, -1, TILE_ROWS).contiguous()
        else:
            scale = interleave(row_scales(w))
        view.groups, view.subgroup, view.subgroups_per_group = (
            w.scale.shape[1],
            1,
            min(w.block[1], k),
        )
        view.super_type = ELEMENT_TYPES[type_name(w.scale.dtype)]
    packed = Packed(facts, view, codes, memory.keep(scale))
    point(packed)
    return packed


def _pack_affine(w: Affine, memory: WeightMemory) -> Packed:
    n, k = w.shape
    view = _view(n, k)
    view.bits = w.bits
    view.flip = int(w.signed)
    view.zero = (0 if w.minus is not None else w.zero) + (128 if w.signed else 0)
    columns = w.group == 1 and (w.repeats or k > 1)
    if columns:
        view.subgroup, view.scale_rows = 1, w.scale.shape[0]
    elif w.group >= k:
        view.subgroups_per_group = view.k_blocks
    else:
        view.subgroup = TILE_DEPTH if w.group % TILE_DEPTH == 0 else TILE_ROWS
        view.subgroups_per_group = w.group // view.subgroup
    view.groups = w.scale.shape[1]
    view.scale_type = ELEMENT_TYPES[type_name(w.scale.dtype)]
    order = turn if columns else interleave
    scale = order(w.scale)
    super_scale = scale_offset = None
    if w.scale_offset is not None:
        assert w.super_scale is not None
        super_scale, scale_offset = w.super_scale.clone(), interleave(w.scale_offset.unsqueeze(1))
        view.subgroups_per_super = w.super_group // w.group
    elif w.super_scale is not None:
        super_scale = interleave(w.super_scale)
        view.super_type = ELEMENT_TYPES[type_name(super_scale.dtype)]
        view.supers = w.super_scale.shape[1]
        whole = w.super_group >= k  # subgroups of padding too
        view.subgroups_per_super = (
            view.k_blocks * TILE_DEPTH if whole else w.super_group
        ) // view.subgroup
    minus = memory.keep(None if w.minus is None else order(w.minus))
    if minus is not None:
        view.minus_type = ELEMENT_TYPES[type_name(minus.dtype)]
    zeros = None
    if w.zeros is not None:
        zeros, view.zeros_type = pack_zeros(w, w.zeros, columns)
    packed = Packed(
        w.without_data(),
        view,
        _codes(view, memory),
        memory.keep(scale),
        minus,
        memory.keep(zeros),
        memory.keep(super_scale),
        table=_tabulate(view, w.table),
        scale_table=None if w.scale_table is None else w.scale_table.clone(),
        scale_offset=scale_offset,
    )
    point(packed)
    return packed


def _tabulate(view: WeightView, table: Tensor | None) -> Tensor | None:
    """The table with 16 entries; sets its 8-bit integers and their scale in ``view``."""
    if table is None:
        return None
    view.zero = INT8_TABLE_ZERO
    view.int8_table_scale, steps = int8_table(table)
    for i, step in enumerate(steps):
        view.int8_table[i] = step + INT8_TABLE_ZERO
    return torch.nn.functional.pad(table, (0, TABLE_SIZE - len(table))).contiguous()


def int8_table(table: Tensor) -> tuple[float, list[int]]:
    """Scale and integers: ``table[i] ~ scale * integers[i]``, integers from -127 to 127.

    Of about 4000 scales this is the one with the smallest squared error. iq1 to iq4, the 4-bit
    floats of MX and NV formats and signs are multiples of a scale: no error. The error of NF4 is
    2e-5 of the squared weights and that of FP4 1e-5 (normal weights in groups of 64); quantizing
    activations costs 1e-4 of the squared result.
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
    if packed.view.subgroup == 1:
        return replace(
            facts,
            codes=codes,
            scale=turn(packed.scale),
            zeros=None if packed.zeros is None else unpack_columns(facts, packed.zeros),
            minus=None if packed.minus is None else turn(packed.minus),
        )
    found = replace(
        facts,
        codes=codes,
        scale=deinterleave(packed.scale, n),
        zeros=None if packed.zeros is None else unpack_zeros(facts, packed.zeros),
        minus=None if packed.minus is None else deinterleave(packed.minus, n),
    )
    if packed.scale_offset is not None:
        offset = deinterleave(packed.scale_offset, n).flatten()
        supers, table = packed.super_scale, packed.scale_table
        return replace(found, super_scale=supers, scale_table=table, scale_offset=offset)
    if packed.super_scale is not None:
        return replace(found, super_scale=deinterleave(packed.super_scale, n))
    return found


def _pack_blocks(w: Blocks, n: int, memory: WeightMemory) -> Packed:
    """Tensors for the native code to fill, including scales."""
    k = w.shape[1]
    kind, source = BLOCK_TYPES[w.type], BLOCK_SOURCES[w.type]
    view = _view(n, k)
    view.source, view.bits, view.zero = source.number, source.bits, source.zero
    view.flip = int(w.type == "q8_0")
    view.subgroup = kind.group
    view.groups = k // kind.group
    view.scale_type = view.minus_type = ELEMENT_TYPES[source.scale]

    def scales(groups: int, dtype: torch.dtype) -> Tensor:
        return memory.take((view.row_blocks, groups, TILE_ROWS), dtype)

    scale = scales(view.groups, getattr(torch, source.scale))
    if w.type == "q3_k":
        view.scale_type, scale = I6, memory.take((view.row_blocks, view.groups, 12), torch.uint8)
    minus = super_scale = super_minus = None
    if source.has_minus and w.type != "q2_k":
        minus = scales(view.groups, getattr(torch, source.scale))
    if kind.elements > kind.group:
        view.supers = k // kind.elements
        view.subgroups_per_super = kind.elements // kind.group
        super_scale = scales(view.supers, torch.float16)
        super_minus = scales(view.supers, torch.float16) if source.has_minus else None
    facts = Blocks((n, k), w.type, w.data.new_empty(0, 0))
    codes = _codes(view, memory)
    table = _tabulate(view, torch.tensor(kind.table, dtype=torch.float32)) if kind.table else None
    packed = Packed(facts, view, codes, scale, minus, None, super_scale, super_minus, table)
    point(packed)
    if w.type == "q2_k":  # one byte holds scale and min
        view.scale_type, view.minus_type = LOW_4, HIGH_4
        view.minus = view.scale
    return packed


def _codes(view: WeightView, memory: WeightMemory) -> Tensor:
    """Storage of the tiles."""
    return memory.take(
        (view.row_blocks * view.k_blocks * view.bits * TILE_BYTES_PER_BIT,), torch.uint8
    )


def point(packed: Packed) -> None:
    """Set the addresses of the tensors in the view."""
    view = packed.view
    parts = ("codes", "scale", "minus", "zeros", "super_scale", "super_minus", "table")
    for name in (*parts, "scale_table", "scale_offset"):
        tensor = getattr(packed, name)
        setattr(view, name, None if tensor is None else tensor.data_ptr())
