"""The layouts of weights that kernels support, one frozen dataclass each.

One formula covers nearly every weight format (``k`` runs along the input, ``g = k // group``)::

    w[n, k] = scale[n, g] * (code[n, k] - zero[n, g])  or  scale[n, g] * code[n, k] - minus[n, g]
                                                       or  scale[n, g] * table[code[n, k]]

``Affine`` is that formula with packed codes. ``Blocks`` keeps the blocks of a GGUF file unchanged,
so that loading copies nothing, and k-quants keep their size (flattening their two-level scales
would add 7 to 52 %). ``Float8`` is a matrix of 8-bit floats with scales, ``Dense`` a plain float
matrix. A matrix is always ``[out, in]``, here ``[N, K]``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any, Literal

from sdk.kernels.dataclass import dataclass
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch, type_name

_FLOATS = ("float32", "float16", "bfloat16")
_FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
#: Scales that are powers of two (MX formats) or 8-bit floats (NVFP4) stay bytes.
_SCALES = (*_FLOATS, "float8_e4m3fn", "float8_e8m0fnu")
#: Bits of the codes that index a table; each width has a kernel.
TABLE_BITS = (1, 3, 4)


@dataclass(frozen=True, slots=True)
class ActivationScheme:
    """How a file quantizes the activations of a matrix: ``x ~ scale * (code - zero)``.

    ``codes``: ``int`` of ``bits`` bits; or floats, ``e4m3`` of 8 bits or ``e2m1`` of 4. ``group``
    values along K share a scale; 0: the whole row. ``static``: one scale for all rows. Without it,
    scales are computed from the values by ``rule``: ``plain``, ``absmax`` (of symmetric integers:
    the largest magnitude becomes the largest positive code, not half a code above it), ``mx`` (a
    power of two, OCP Microscaling), ``power`` (plain, rounded up to a power of two) or ``nv``
    (plain times ``factor``, as an 8-bit float). ``zero`` is the zero point of ``static``; dynamic
    scales that are not ``symmetric`` compute theirs. ``limit`` is an upper bound on the magnitude
    used for a scale. kernels/reference/fake_quantize.py is the exact definition.

    :raises KernelError: bits, group, zero point or scales are out of range.
    """

    codes: Literal["int", "e4m3", "e2m1"]
    bits: int = 8
    group: int = 0
    rule: Literal["plain", "absmax", "mx", "power", "nv"] = "plain"
    static: float | None = None
    zero: int = 0
    symmetric: bool = True
    factor: float = 1.0
    limit: float = math.inf

    def __post_init__(self) -> None:
        numbers = (1.0 if self.static is None else self.static, self.factor, self.limit)
        half = 1 << self.bits - 1
        width = {"int": self.bits, "e4m3": 8, "e2m1": 4}[self.codes]
        sound = 2 <= self.bits == width <= 8 and self.group >= 0 and -half <= self.zero < half
        if not sound or any(not number > 0 for number in numbers) or math.inf in numbers[:2]:
            raise KernelError(f"activation scheme: expected positive scales, found {self!r}")
        if self.rule == "absmax" and (self.floats or not self.symmetric):
            raise KernelError(f"activation scheme: expected symmetric integers, found {self!r}")

    @property
    def floats(self) -> bool:
        """Whether the codes are floats."""
        return self.codes != "int"

    def __str__(self) -> str:
        """``int8 per token``, ``e4m3 static``, ``e4m3 per 128`` ..."""
        codes = self.codes if self.floats else f"int{self.bits}"
        sign = "" if self.symmetric else " asymmetric"
        if self.static is not None:
            return f"{codes} static{sign}"
        return f"{codes} per {self.group or 'token'}{sign}"


@dataclass(frozen=True, slots=True)
class Dense:
    """``values [N, K]`` in float32, float16, bfloat16, float8_e4m3fn or float8_e5m2."""

    values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


@dataclass(frozen=True, slots=True)
class Float8:
    """8-bit floats with a scale per block: ``w[n, k] = values[n, k] * scale[n // bn, k // bk]``.

    ``values [N, K]`` in float8_e4m3fn or float8_e5m2, ``scale`` float32 or float8_e8m0fnu
    ``[ceil(N / bn), ceil(K / bk)]``, ``block = (bn, bk)``: ``(N, K)`` is one scale per tensor,
    ``(1, K)`` one per output channel; the last block in each direction may be smaller.
    ``inputs``: how the file quantizes activations, if it does.
    """

    values: Tensor
    scale: Tensor
    block: tuple[int, int]
    inputs: ActivationScheme | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes


@dataclass(frozen=True, slots=True)
class Affine:
    """Codes in groups along K: integers, or indices into a table.

    ``codes`` uint8 ``[N, ceil(K * bits / 8)]``, each row one bit stream, lowest bit first
    (4 bits: byte j holds code 2j in its low and code 2j + 1 in its high nibble).
    ``scale [N, ceil(K / group)]`` in the file's own type, never rounded again: float32, float16,
    bfloat16, float8_e4m3fn, or float8_e8m0fnu (a byte e is ``2^(e - 127)``).
    At most one of ``zero`` (one constant for all), ``zeros`` or ``minus`` (float per group) is
    subtracted. ``zeros`` are packed like the codes, uint8 ``[N, ceil(G * bits / 8)]`` for G groups,
    or floats ``[N, G]``. ``signed`` codes are two's complement (8 bits only).

    With groups of one column ``scale``, ``zeros`` and ``minus`` may have fewer rows R, a divisor of
    N: row n uses those of row n % R (groups across rows, HQQ's axis 0).

    ``table`` float32 ``[2^bits]`` (1, 3 or 4 bits): codes are indices, and nothing is subtracted.
    ``super_scale`` float32 or float16 ``[N, ceil(K / super_group)]``: a second level of scales;
    ``scale`` may then also be uint8 or int8. The scale of a weight is the product, in float32.
    ``scale_table`` float32 ``[256]``: the values of uint8 scales; ``scale_offset`` float32 ``[N]``
    is added to the product. Their ``super_scale`` float32 ``[ceil(N * K / super_group)]`` continues
    over row ends, and rows are whole groups. Source: QLoRA (Dettmers et al., 2023), section 3.
    ``name``: the format's name for users (``nf4``), if bits and group do not determine it.
    ``inputs``: how the file quantizes activations, if it does.
    """

    shape: tuple[int, int]
    bits: int
    group: int
    codes: Tensor
    scale: Tensor
    zero: int = 0
    zeros: Tensor | None = None
    minus: Tensor | None = None
    signed: bool = False
    table: Tensor | None = None
    super_scale: Tensor | None = None
    super_group: int = 0
    scale_table: Tensor | None = None
    scale_offset: Tensor | None = None
    name: str = ""
    inputs: ActivationScheme | None = None

    @property
    def sharing(self) -> int | None:
        """Columns that share a scale; None for a whole row."""
        if self.repeats:
            return self.shape[0] // self.scale.shape[0]
        return None if self.group >= self.shape[1] else self.group

    @property
    def repeats(self) -> bool:
        """Whether rows share scales."""
        height = self.scale.shape[0]
        return 0 < height < self.shape[0] and self.shape[0] % height == 0

    @property
    def nbytes(self) -> int:
        levels = (self.scale, self.super_scale, self.scale_table, self.scale_offset)
        parts = (self.codes, *levels, self.zeros, self.minus)
        return sum(part.nbytes for part in parts if part is not None)

    def without_data(self) -> Affine:
        """The parameters of this weight, with empty tensors for codes and scales.

        For kernels that pack it: slices would keep the original tensors alive.
        """
        return replace(
            self,
            codes=self.codes.new_empty(0, 0),
            scale=self.scale.new_empty(0, 0),
            zeros=None,
            minus=None,
            super_scale=None,
            scale_table=None,
            scale_offset=None,
        )


@dataclass(frozen=True, slots=True)
class BlockType:
    """A GGUF block type: ``elements`` weights in ``nbytes`` bytes, a scale per ``group``.

    ``table``: the values that codes index, if they are not integers.
    """

    name: str
    elements: int
    nbytes: int
    group: int
    table: tuple[float, ...] = ()

    @property
    def bits_per_weight(self) -> float:
        return self.nbytes * 8 / self.elements


#: The 4-bit floats of MXFP4 and NVFP4: 2 bits of exponent, 1 of mantissa. Source: OCP Microscaling
#: Formats 1.0; a negative zero is a zero.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
#: Source: ggml-common.h, kvalues_iq4nl.
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

#: ggml's block types that are kept unchanged; reference/decode.py dequantizes them.
BLOCK_TYPES = {
    "q4_0": BlockType("q4_0", 32, 18, 32),
    "q4_1": BlockType("q4_1", 32, 20, 32),
    "q5_0": BlockType("q5_0", 32, 22, 32),
    "q5_1": BlockType("q5_1", 32, 24, 32),
    "q8_0": BlockType("q8_0", 32, 34, 32),
    "q2_k": BlockType("q2_k", 256, 84, 16),
    "q3_k": BlockType("q3_k", 256, 110, 16),
    "q4_k": BlockType("q4_k", 256, 144, 32),
    "q5_k": BlockType("q5_k", 256, 176, 32),
    "q6_k": BlockType("q6_k", 256, 210, 16),
    "iq4_nl": BlockType("iq4_nl", 32, 18, 32, IQ4),
    "iq4_xs": BlockType("iq4_xs", 256, 136, 32, IQ4),
    "mxfp4": BlockType("mxfp4", 32, 17, 32, E2M1),
}


@dataclass(frozen=True, slots=True)
class Blocks:
    """``data`` uint8 ``[N, K / elements * nbytes]``: rows of blocks as in the GGUF file."""

    shape: tuple[int, int]
    type: str
    data: Tensor

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


Layout = Dense | Float8 | Affine | Blocks

#: A piece of a weight has a multiple of as many rows: a strip of the CPU's kernels.
PIECE_ROWS = 32


@dataclass(frozen=True, slots=True)
class Pieces:
    """A weight whose rows are read when they are packed, ``step`` at a time: so the rows of the
    file and all of their packed form are not in memory together.

    ``read(start, count)``: these rows, as ``Dense`` or ``Blocks``; all pieces are alike. ``step``
    is a multiple of ``PIECE_ROWS``.
    """

    shape: tuple[int, int]
    read: Callable[[int, int], Layout]
    step: int

    def pieces(self) -> Iterator[Layout]:
        rows = self.shape[0]
        for start in range(0, rows, self.step):
            yield self.read(start, min(self.step, rows - start))

    def whole(self) -> Layout:
        return self.read(0, self.shape[0])


def inputs_of(layout: Layout) -> ActivationScheme | None:
    """How the file quantizes the activations of this weight, if it does."""
    return layout.inputs if isinstance(layout, Float8 | Affine) else None


def on_device(layout: Layout, device: torch.device) -> Layout:
    """The same weight with its tensors on ``device``."""
    parts = ((field.name, getattr(layout, field.name)) for field in fields(layout))
    tensors: Any = {name: part.to(device) for name, part in parts if isinstance(part, Tensor)}
    return replace(layout, **tensors)


def check_layout(layout: Layout) -> None:
    """Check everything that kernels rely on when they use raw pointers.

    :raises KernelError: a tensor's shape or type contradicts the layout.
    """
    rows, columns = layout.shape
    if rows < 1 or columns < 1:
        raise KernelError(f"weight: expected rows and columns, found {list(layout.shape)}")
    match layout:
        case Dense():
            _expect("dense values", layout.values, (rows, columns), (*_FLOATS, *_FLOAT8))
        case Float8():
            high, wide = layout.block
            if high < 1 or wide < 1:
                raise KernelError(f"float8 block: expected sizes from 1, found {layout.block}")
            _expect("float8 values", layout.values, (rows, columns), _FLOAT8)
            grid = (-(-rows // high), -(-columns // wide))
            _expect("float8 scale", layout.scale, grid, ("float32", "float8_e8m0fnu"))
        case Affine():
            _check_affine(layout)
        case Blocks():
            kind = BLOCK_TYPES.get(layout.type)
            if kind is None or columns % kind.elements:
                raise KernelError(
                    f"blocks: expected whole blocks of one of {sorted(BLOCK_TYPES)}, "
                    f"found {columns} columns of {layout.type!r}"
                )
            size = columns // kind.elements * kind.nbytes
            _expect("blocks", layout.data, (rows, size), ("uint8",))


def _check_affine(w: Affine) -> None:
    if not 1 <= w.bits <= 8 or w.group < 1:
        raise KernelError(
            f"affine weight: expected 1 to 8 bits and groups from 1, found {w.bits} and {w.group}"
        )
    if w.signed and (w.bits != 8 or w.zeros is not None):
        raise KernelError("affine weight: signed codes must have 8 bits and no zero points")
    if w.zeros is not None and w.minus is not None:
        raise KernelError("affine weight: expected zeros or minus, found both")
    if w.table is not None:
        _check_table(w, w.table)
    rows, columns = w.shape
    _expect("affine codes", w.codes, (rows, -(-columns * w.bits // 8)), ("uint8",))
    grid = (rows, -(-columns // w.group))
    if w.repeats and w.group == 1 and w.table is None and w.super_scale is None:
        grid = (w.scale.shape[0], columns)
    integers = ("uint8", "int8") if w.super_scale is not None else ()
    _expect("affine scale", w.scale, grid, (*_SCALES, *integers))
    if w.zeros is not None and w.zeros.is_floating_point():
        _expect("affine zeros", w.zeros, grid, _FLOATS)
    elif w.zeros is not None:
        _expect("affine zeros", w.zeros, (grid[0], -(-grid[1] * w.bits // 8)), ("uint8",))
    if w.minus is not None:
        _expect("affine minus", w.minus, grid, _FLOATS)
    if w.scale_table is not None:
        _check_scale_table(w, w.scale_table)
    elif w.super_scale is not None:
        if w.super_group < 1 or (w.super_group % w.group and w.super_group < columns):
            raise KernelError(
                f"affine weight: expected super groups of whole groups of {w.group}, "
                f"found {w.super_group}"
            )
        if w.minus is not None:
            raise KernelError("affine weight: expected minus or two levels of scales, found both")
        supers = (rows, -(-columns // w.super_group))
        _expect("affine super_scale", w.super_scale, supers, ("float32", "float16"))


def _check_scale_table(w: Affine, table: Tensor) -> None:
    rows, columns = w.shape
    supers = -(-rows * columns // max(w.super_group, 1))
    count, short = divmod(w.super_group, w.group)
    whole = count > 0 and not short and not count & count - 1 and not columns % w.group
    if w.super_scale is None or w.scale_offset is None or not whole:
        raise KernelError(
            f"affine scale_table: expected rows of whole groups of {w.group}, super scales for a "
            f"power of two of them, and offsets, found {columns} columns and {w.super_group}"
        )
    _expect("affine scale", w.scale, (rows, columns // w.group), ("uint8",))
    _expect("affine scale_table", table, (256,), ("float32",))
    _expect("affine super_scale", w.super_scale, (supers,), ("float32",))
    _expect("affine scale_offset", w.scale_offset, (rows,), ("float32",))


def _check_table(w: Affine, table: Tensor) -> None:
    if w.bits not in TABLE_BITS:
        raise KernelError(f"affine table: expected {TABLE_BITS} bits, found {w.bits}")
    if w.zero or w.zeros is not None or w.minus is not None or w.signed:
        raise KernelError("affine table: expected no zero points or minus, found some")
    _expect("affine table", table, (1 << w.bits,), ("float32",))
    if not bool(table.isfinite().all()):
        raise KernelError(f"affine table: expected finite values, found {table.tolist()}")


def _expect(what: str, tensor: Tensor, shape: tuple[int, ...], types: tuple[str, ...]) -> None:
    if tuple(tensor.shape) != shape or type_name(tensor.dtype) not in types:
        names = " or ".join(f"torch.{name}" for name in types)
        raise KernelError(
            f"{what}: expected {names} {list(shape)}, found {tensor.dtype} {list(tensor.shape)}"
        )
