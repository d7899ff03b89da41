"""One ``[out, in]`` weight matrix in its packed layout: cut, joined and multiplied.

A weight comes from a checkpoint as plain tensors (``layout``). It may be cut for tensor parallelism
(``narrow``) or fused with its neighbours (``concat``), and is then bound once to its kernel
(``bind``), which may reorder it. ``dequantize`` defines its value and returns the same bits before
and after ``bind``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Literal

from sdk.kernels.backend import Choice
from sdk.kernels.lazy_torch import Tensor, torch, type_name
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.rounding import Rounding, Rows
from sdk.kernels.reference.decode import cut_codes, decode, flat_scales
from sdk.kernels.reference.linear import gather_rows, reorder_rows, slice_rows
from sdk.kernels.weights.bound import BoundLinear, rows_of_part
from sdk.kernels.weights.layouts import (
    BLOCK_TYPES,
    Affine,
    Blocks,
    Dense,
    Float8,
    Layout,
    check_layout,
)
from sdk.quant.errors import AlignmentError
from sdk.quant.join import join
from sdk.quant.spec import QuantSpec, WeightKind

Side = Literal["in", "out"]

_FLOAT_NAMES = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8_e5m2",
}


class Weight(ABC):
    """One matrix ``[out_features, in_features]``."""

    shape: tuple[int, int]
    #: How its file quantizes its activations, printed; empty for activations in float.
    inputs: str = ""

    @property
    @abstractmethod
    def spec(self) -> QuantSpec:
        """The type of its values."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes it occupies in memory now."""

    @abstractmethod
    def dequantize(self) -> Tensor:
        """Its value, float32 ``[out, in]``, in a new tensor."""

    @abstractmethod
    def narrow(self, side: Side, start: int, count: int) -> Weight:
        """Rows (``"out"``) or columns (``"in"``) ``start : start + count``; only before ``bind``.

        :raises AlignmentError: the range is outside the weight, or cuts a quantization group.
        """

    def joined(self, others: Sequence[Weight]) -> Weight | None:
        """This weight and the others, concatenated along ``out``; ``None`` if layouts differ."""
        return None

    def reordered(self, order: Tensor) -> Weight | None:
        """This weight with output row ``order[j]`` (int64 ``[out]``, each once) in place j, as many
        bytes in memory; ``None`` if its layout has no such form. Only before ``bind``."""
        return None

    @abstractmethod
    def bind(self, ops: Ops, activation_bits: int = 8) -> None:
        """Choose the kernel and give it the tensors. Call once, before ``matmul``.

        ``activation_bits``: see :meth:`sdk.kernels.operators.ops.Ops.linear`.
        """

    @abstractmethod
    def shared(self, ops: Ops) -> Weight:
        """This bound weight, for the operators of another engine: its memory is that of both."""

    @property
    def gates(self) -> bool:
        """Whether :meth:`matmul` takes an ``activation``; only after ``bind``."""
        return False

    @property
    def rounding(self) -> Rounding | None:
        """How :meth:`matmul` takes rows as codes, if it does; only after ``bind``."""
        return None

    @abstractmethod
    def matmul(self, x: Rows, out: Tensor | None = None, activation: str = "") -> Tensor:
        """``x [M, in] -> x @ w.T [M, out]``, float32; in ``out`` (rows may be strided) or new.

        ``activation``: see :meth:`sdk.kernels.weights.bound.BoundLinear.matmul`.
        """

    @abstractmethod
    def rows(self, ids: Tensor, part: tuple[int, int] | None = None) -> Tensor:
        """Output rows ``ids`` (int64 ``[T]``), dequantized: float32 ``[T, in]``."""

    @abstractmethod
    def choices(self) -> list[Choice]:
        """The chosen kernel of each part; empty before ``bind``."""


class PackedWeight(Weight):
    """A weight with a single layout; subclasses implement how it is cut along ``in``."""

    def __init__(self, layout: Layout) -> None:
        self.shape = layout.shape
        self._layout: Layout | None = layout
        self._bound: BoundLinear | None = None

    @property
    def layout(self) -> Layout:
        """The tensors, in the canonical order of :mod:`sdk.kernels.weights.layouts`."""
        if self._bound is not None:
            return self._bound.layout()
        assert self._layout is not None
        return self._layout

    @property
    def nbytes(self) -> int:
        return self._bound.nbytes if self._bound is not None else self.layout.nbytes

    def dequantize(self) -> Tensor:
        return decode(self.layout)

    def forget(self) -> None:
        """Give up what was packed, and with it the value: only the shape is left."""
        self._bound = None

    def narrow(self, side: Side, start: int, count: int) -> Weight:
        limit = self.shape[0 if side == "out" else 1]
        if start < 0 or count < 1 or start + count > limit:
            raise AlignmentError(
                f"cannot cut {side} features {start}..{start + count} of a weight with {limit}"
            )
        if side == "out":
            return self.take_rows(start, count)
        return type(self)(self._narrow_in(start, count))

    def take_rows(self, start: int, count: int, step: int = 1) -> Weight:
        """``count`` output rows, every ``step``-th from ``start`` on; only before ``bind``."""
        return type(self)(slice_rows(self.layout, start, start + count * step, step))

    def with_rows(self, rows: Tensor) -> Weight:
        """Output rows ``rows`` (int64 ``[T]``) in this order; only before ``bind``."""
        return type(self)(gather_rows(self.layout, rows))

    def joined(self, others: Sequence[Weight]) -> Weight | None:
        layouts = [part.layout for part in (self, *others) if isinstance(part, PackedWeight)]
        joined = join(layouts) if len(layouts) == 1 + len(others) else None
        return None if joined is None else weight_of(joined)

    def reordered(self, order: Tensor) -> Weight | None:
        layout = reorder_rows(self.layout, order)
        return None if layout is None else type(self)(layout)

    def _narrow_in(self, start: int, count: int) -> Layout:
        raise NotImplementedError

    def _check_group(self, group: int, start: int, count: int) -> None:
        end = start + count
        if start % group or (end % group and end != self.shape[1]):
            raise AlignmentError(
                f"in features {start}..{end} cut through a group: "
                f"expected multiples of {group} ({self.spec}), in_features {self.shape[1]}"
            )

    def bind(self, ops: Ops, activation_bits: int = 8) -> None:
        if self._bound is None:
            self._bound = ops.linear(self.layout, activation_bits)
            self._layout = None

    def shared(self, ops: Ops) -> Weight:
        found = copy(self)
        found._bound = self.bound.shared(ops.context)
        return found

    @property
    def bound(self) -> BoundLinear:
        """The weight bound to its kernel."""
        assert self._bound is not None, "bind() the weight first"
        return self._bound

    @property
    def gates(self) -> bool:
        return self.bound.gates

    @property
    def rounding(self) -> Rounding | None:
        return self.bound.rounding

    def matmul(self, x: Rows, out: Tensor | None = None, activation: str = "") -> Tensor:
        return self.bound.matmul(x, out, activation)

    def rows(self, ids: Tensor, part: tuple[int, int] | None = None) -> Tensor:
        if self._bound is None:
            return decode(gather_rows(self.layout, ids))
        return self._bound.rows(ids, part)

    def choices(self) -> list[Choice]:
        return [] if self._bound is None else [self._bound.choice]


class DenseWeight(PackedWeight):
    """A float matrix in the type of its file."""

    def __init__(self, layout: Layout) -> None:
        assert isinstance(layout, Dense)
        if type_name(layout.values.dtype) not in _FLOAT_NAMES:
            raise AlignmentError(
                f"dense weight: expected one of {list(_FLOAT_NAMES)}, found {layout.values.dtype}"
            )
        self._spec = QuantSpec.parse(_FLOAT_NAMES[type_name(layout.values.dtype)])
        super().__init__(layout)

    @property
    def spec(self) -> QuantSpec:
        return self._spec

    def dequantize(self) -> Tensor:
        layout = self.layout
        assert isinstance(layout, Dense)
        return layout.values.to(torch.float32, copy=True)

    def _narrow_in(self, start: int, count: int) -> Layout:
        layout = self.layout
        assert isinstance(layout, Dense)
        return Dense(layout.values[:, start : start + count])


class Float8Weight(PackedWeight):
    """8-bit floats with a float32 scale per tensor, output channel or 2-D block."""

    def __init__(self, layout: Layout) -> None:
        assert isinstance(layout, Float8)
        check_layout(layout)
        spec = QuantSpec.parse(_FLOAT_NAMES[type_name(layout.values.dtype)])
        self._spec = spec.rounding(layout.inputs)
        self.inputs = str(layout.inputs or "")
        super().__init__(layout)

    @property
    def spec(self) -> QuantSpec:
        return self._spec

    def _narrow_in(self, start: int, count: int) -> Layout:
        w = self.layout
        assert isinstance(w, Float8)
        wide = w.block[1]
        if wide < w.shape[1]:
            self._check_group(wide, start, count)
        scale = w.scale[:, start // wide : -(-(start + count) // wide)]
        return replace(w, values=w.values[:, start : start + count], scale=scale)


class AffineWeight(PackedWeight):
    """Integers, or indices into a table, in groups along ``in`` (layouts.Affine)."""

    def __init__(self, layout: Layout) -> None:
        assert isinstance(layout, Affine)
        if layout.name:
            kind: WeightKind = "block" if layout.table is None else "table"
            spec = QuantSpec(kind, layout.bits, layout.name, layout.group)
        else:
            symmetric = layout.minus is None and layout.zeros is None
            spec = QuantSpec("int", layout.bits, group=layout.sharing, symmetric=symmetric)
        self._spec = spec.rounding(layout.inputs)
        self.inputs = str(layout.inputs or "")
        super().__init__(layout)

    @property
    def spec(self) -> QuantSpec:
        return self._spec

    def _narrow_in(self, start: int, count: int) -> Layout:
        w = self.layout
        assert isinstance(w, Affine)
        if w.group < w.shape[1]:  # one group for the whole row may be cut anywhere
            self._check_group(w.group, start, count)
        if w.scale_table is not None:
            w = flat_scales(w)
        if w.super_scale is not None and w.super_group < w.shape[1]:
            self._check_group(w.super_group, start, count)
        end = start + count
        first, last = start // w.group, -(-end // w.group)
        zeros = w.zeros
        if zeros is not None and zeros.is_floating_point():
            zeros = zeros[:, first:last]
        elif zeros is not None:
            zeros = cut_codes(zeros, w.bits, first, last)
        supers = w.super_scale
        if supers is not None:
            supers = supers[:, start // w.super_group : -(-end // w.super_group)]
        return replace(
            w,
            shape=(w.shape[0], count),
            codes=cut_codes(w.codes, w.bits, start, end),
            scale=w.scale[:, first:last],
            zeros=zeros,
            minus=None if w.minus is None else w.minus[:, first:last],
            super_scale=supers,
        )


class BlockWeight(PackedWeight):
    """GGUF blocks, byte for byte as in their file."""

    def __init__(self, layout: Layout) -> None:
        assert isinstance(layout, Blocks)
        self._spec = QuantSpec.parse(layout.type)
        super().__init__(layout)

    @property
    def spec(self) -> QuantSpec:
        return self._spec

    def _narrow_in(self, start: int, count: int) -> Layout:
        w = self.layout
        assert isinstance(w, Blocks)
        kind = BLOCK_TYPES[w.type]
        self._check_group(kind.elements, start, count)
        first, last = start // kind.elements, (start + count) // kind.elements
        data = w.data[:, first * kind.nbytes : last * kind.nbytes]
        return Blocks((w.shape[0], count), w.type, data)


class StackedWeight(Weight):
    """Weights of different layouts whose outputs are concatenated.

    For example a fused q/k/v projection of a file that stores v with more bits.
    """

    def __init__(self, parts: Sequence[Weight]) -> None:
        self.parts = tuple(parts)
        self.shape = (sum(part.shape[0] for part in self.parts), self.parts[0].shape[1])
        self.inputs = "+".join(dict.fromkeys(part.inputs for part in parts if part.inputs))
        self._ops: Ops | None = None

    @property
    def spec(self) -> QuantSpec:
        specs = {str(part.spec): part.spec for part in self.parts}
        if len(specs) == 1:
            return self.parts[0].spec
        bits = max(part.spec.bits for part in self.parts)
        return QuantSpec("block", bits, name="+".join(specs))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def dequantize(self) -> Tensor:
        return torch.cat([part.dequantize() for part in self.parts])

    def narrow(self, side: Side, start: int, count: int) -> Weight:
        if side == "in":
            return StackedWeight([part.narrow(side, start, count) for part in self.parts])
        if start < 0 or count < 1 or start + count > self.shape[0]:
            raise AlignmentError(
                f"cannot cut out features {start}..{start + count} of a weight with {self.shape[0]}"
            )
        kept: list[Weight] = []
        offset = 0
        for part in self.parts:
            low, high = max(start - offset, 0), min(start + count - offset, part.shape[0])
            if low < high:
                kept.append(part.narrow("out", low, high - low))
            offset += part.shape[0]
        return kept[0] if len(kept) == 1 else StackedWeight(kept)

    def reordered(self, order: Tensor) -> Weight | None:
        parts: list[Weight] = []
        offset = 0
        for part in self.parts:
            own = order[offset : offset + part.shape[0]] - offset
            rows = own.numpy()
            inside = rows.min() >= 0 and rows.max() < part.shape[0]
            moved = part.reordered(own) if inside else None
            if moved is None:
                return None
            parts.append(moved)
            offset += part.shape[0]
        return StackedWeight(parts)

    def bind(self, ops: Ops, activation_bits: int = 8) -> None:
        self._ops = ops
        for part in self.parts:
            part.bind(ops, activation_bits)

    def shared(self, ops: Ops) -> StackedWeight:
        found = copy(self)
        found._ops, found.parts = ops, tuple(part.shared(ops) for part in self.parts)
        return found

    def matmul(self, x: Rows, out: Tensor | None = None, activation: str = "") -> Tensor:
        assert self._ops is not None, "bind() the weight before matmul()"
        assert not activation, "gate and up may lie in different parts"
        if out is None:
            out = self._ops.empty(x.shape[0], self.shape[0])
        offset = 0
        for part in self.parts:
            part.matmul(x, out[:, offset : offset + part.shape[0]])
            offset += part.shape[0]
        return out

    def rows(self, ids: Tensor, part: tuple[int, int] | None = None) -> Tensor:
        if part is not None:
            return rows_of_part(self.rows, self.shape[0], ids, part)
        out = torch.empty(ids.shape[0], self.shape[1], device=ids.device)
        offset = 0
        for piece in self.parts:
            inside = (ids >= offset) & (ids < offset + piece.shape[0])
            if bool(inside.any()):
                out[inside] = piece.rows(ids[inside] - offset)
            offset += piece.shape[0]
        return out

    def choices(self) -> list[Choice]:
        return [choice for part in self.parts for choice in part.choices()]


def concat(weights: Sequence[Weight]) -> Weight:
    """Weights concatenated along ``out``: one layout if they agree, else a :class:`StackedWeight`.

    :raises AlignmentError: the numbers of ``in`` features differ.
    """
    widths = {weight.shape[1] for weight in weights}
    if len(widths) != 1:
        raise AlignmentError(f"cannot join weights with different in features: {sorted(widths)}")
    if len(weights) == 1:
        return weights[0]
    parts: list[Weight] = []
    for weight in weights:
        parts.extend(weight.parts if isinstance(weight, StackedWeight) else (weight,))
    whole = parts[0].joined(parts[1:])
    if whole is not None:
        return whole
    runs: list[Weight] = []  # neighbours that agree: Q4_K_M stores v with more bits than q and k
    for part in parts:
        joined = runs[-1].joined([part]) if runs else None
        if joined is None:
            runs.append(part)
        else:
            runs[-1] = joined
    return StackedWeight(runs)


def weight_of(layout: Layout) -> PackedWeight:
    """The weight of a layout, in the class for that layout."""
    match layout:
        case Dense():
            return DenseWeight(layout)
        case Float8():
            return Float8Weight(layout)
        case Affine():
            return AffineWeight(layout)
        case Blocks():
            return BlockWeight(layout)
