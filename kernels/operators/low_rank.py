"""Low-rank adapters of a product: ``y[t] += b (a x[t]) + bias`` of the adapter in ``slots[t]``.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021, arXiv 2106.09685). A product
has a :class:`AdapterTable` with a fixed number of slots. Its operator is part of a recorded step
and looks the factors up when the step runs, so adapters come and go while the step stays.

Factors have 16 bits: float16, or the type of activations if those have 16 bits; with
``compute="exact"`` float32. A matrix in float16 is multiplied by a power of two that brings its
largest magnitude to 2^14..2^15, and the product by the inverse. So factors of a 16-bit file are
exact if their magnitudes are within 2^29 of each other, whatever their range is; float32 ones are
rounded to 11 bits. On a CPU factors may be int8: values are rounded by at most 1/254 of the largest
magnitude that the matrix has for the rank. Sums are float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from sdk.kernels.backend import Problem
from sdk.kernels.context import Context
from sdk.kernels.dataclass import dataclass
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.checks import expect, expect_floats
from sdk.kernels.system import SYSTEM

#: Factors of each part begin at a multiple of this, in bytes.
ALIGN = 64
#: The magnitudes of a float16 matrix are below two to this power.
_TOP = 15


class Factors(NamedTuple):
    """``y[:, first : first + count] += scale * (x @ a.T) @ b.T``: a ``[r, in]``, b ``[count, r]``.

    x of an embedding is one-hot: then column i of ``a`` belongs to token i. int8 factors have
    ``scales``, float32 ``[r]``: those of a rank's codes in ``a`` and in ``b``, multiplied.
    """

    a: Tensor
    b: Tensor
    first: int
    scale: float = 1.0
    scales: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Update:
    """What an adapter does to one product, packed for its kernel. ``bias`` float32 ``[out]``."""

    factors: tuple[Factors, ...]
    bias: Tensor | None


class Shape(NamedTuple):
    """Of a table: slots, the product's features, and the most factors of an update and their ranks.

    ``of_ids``: the product is an embedding of ``in_features`` tokens.
    """

    slots: int
    in_features: int
    out_features: int
    parts: int = 1
    max_rank: int = 64
    of_ids: bool = False


class Table(Protocol):
    """The slots of one product, in the memory layout of one backend."""

    def factor_bytes(self, rank: int, first: int, count: int) -> int:
        """Bytes of packed factors."""

    def place(self, factors: Factors, memory: Tensor) -> Factors:
        """Factors that have their final type and device, packed into ``memory``: uint8
        ``[factor_bytes]``."""

    def write(self, slot: int, update: Update | None) -> None:
        """Put an update into a slot, or nothing. No step is running."""

    def add(self, x: Tensor, y: Tensor, slots: Tensor) -> None:
        """The operator: see :meth:`AdapterTable.add`."""


class LowRankKernel(Protocol):
    """An implementation of the operator ``low_rank``."""

    name: str

    def reject(self, problem: Problem) -> str | None: ...

    def table(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> Table:
        """``dtype``: of packed factors."""


class AdapterTable:
    """The adapters of one product, by slot."""

    def __init__(self, context: Context, shape: Shape, dtype: torch.dtype | None = None) -> None:
        self.shape = shape
        self._context = context
        self.dtype = _factor_type(context) if dtype is None else dtype
        kernel: LowRankKernel = context.kernel("low_rank", (shape, self.dtype))
        self._table = kernel.table(shape, self.dtype, context.device)

    def nbytes(self, parts: Sequence[Factors], *, bias: bool) -> int:
        """Bytes of an update with such factors, and a bias."""
        total = sum(self._part_bytes(part) for part in parts)
        return total + (_aligned(4 * self.shape.out_features) if bias else 0)

    def _part_bytes(self, part: Factors) -> int:
        count, rank = part.b.shape
        return _aligned(self._table.factor_bytes(rank, part.first, count))

    def pack(self, parts: Sequence[Factors], bias: Tensor | None, memory: Tensor) -> Update:
        """Convert factors to their final type and layout, into ``memory``: uint8 ``[nbytes]`` of
        :meth:`nbytes`, on the device. Changes nothing else, so that any thread may call it.

        :raises KernelError: shapes that do not fit the product, or too many factors.
        """
        ranks = [len(part.a) for part in parts]
        if len(ranks) > self.shape.parts or max(ranks, default=0) > self.shape.max_rank:
            raise KernelError(
                f"adapter: expected at most {self.shape.parts} factors of ranks up to "
                f"{self.shape.max_rank}, found ranks {ranks}"
            )
        placed: list[Factors] = []
        for part in parts:
            rank, count = part.a.shape[0], part.b.shape[0]
            last = part.first + count
            if (
                part.a.shape != (rank, self.shape.in_features)
                or part.b.shape != (count, rank)
                or not 0 <= part.first <= last <= self.shape.out_features
            ):
                raise KernelError(
                    f"adapter: expected a [r, {self.shape.in_features}] and b [n, r] for some of "
                    f"{self.shape.out_features} outputs, found {list(part.a.shape)}, "
                    f"{list(part.b.shape)} from {part.first} on"
                )
            own, memory = _split(memory, self._part_bytes(part))
            placed.append(self._table.place(self._converted(part), own))
        if bias is not None:
            own, memory = _split(memory, 4 * self.shape.out_features)
            bias = own.view(torch.float32).copy_(bias)
        return Update(tuple(placed), bias)

    def _converted(self, part: Factors) -> Factors:
        """The factors in their final type on the device."""
        device, dtype, scale = self._context.device, self.dtype, part.scale
        if dtype == torch.int8:
            (a, of_a), (b, of_b) = (_rounded(one.float()) for one in (part.a, part.b.t()))
            return Factors(a, b.t(), part.first, scale, of_a * of_b)
        if dtype != torch.float16:
            return part._replace(a=part.a.to(device, dtype), b=part.b.to(device, dtype))
        found = []
        for factor in (part.a.float(), part.b.float()):
            power = _power(factor)
            found.append((factor * 2.0**power).to(device, dtype))
            scale *= 2.0**-power
        return part._replace(a=found[0], b=found[1], scale=scale)

    def write(self, slot: int, update: Update | None) -> None:
        """Put an update into a slot, or nothing. No step may run meanwhile."""
        if not 0 <= slot < self.shape.slots:
            raise KernelError(f"adapter slot: expected 0..{self.shape.slots - 1}, found {slot}")
        self._table.write(slot, update)

    def add(self, x: Tensor, y: Tensor, slots: Tensor) -> None:
        """``y[t] += update of slot slots[t] for x[t]``; -1, and an empty slot, add nothing.

        x ``[T, in]`` or, of an embedding, int64 ids ``[T]``; y ``[T, out]``; slots int32 ``[T]``.

        :raises KernelError: shapes or types that do not fit.
        """
        tokens, inputs, outputs = x.shape[0], self.shape.in_features, self.shape.out_features
        if self.shape.of_ids:
            expect("adapter ids", x, torch.int64, None)
        else:
            expect_floats("adapter x", x, self._context.activations, tokens, inputs)
        expect_floats("adapter y", y, self._context.activations, tokens, outputs)
        if slots.dtype != torch.int32 or slots.shape != (tokens,) or not slots.is_contiguous():
            raise KernelError(
                f"adapter slots: expected int32 [{tokens}], found {slots.dtype} {list(slots.shape)}"
            )
        if tokens:
            self._table.add(x.contiguous(), y, slots)


def factor_memory(nbytes: int, device: torch.device) -> Tensor:
    """Memory for packed factors, uint8, which begins at a multiple of 64 bytes.

    On a CPU it is a mapping of its own, on huge pages where the system has them. It is unmapped
    with its last tensor: the C allocator would keep much of it.

    :raises KernelError: the system has no more memory.
    """
    if device.type != "cpu" or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    try:
        memory = SYSTEM.map_private(nbytes, huge=True)
    except OSError as error:
        raise KernelError(f"adapter: cannot map {nbytes} bytes: {error}") from error
    return torch.from_numpy(np.frombuffer(memory, np.uint8))


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _split(memory: Tensor, nbytes: int) -> tuple[Tensor, Tensor]:
    return memory[:nbytes], memory[_aligned(nbytes) :]


def _factor_type(context: Context) -> torch.dtype:
    if context.compute == "exact":
        return torch.float32
    return torch.float16 if context.activations == torch.float32 else context.activations


def _rounded(factor: Tensor) -> tuple[Tensor, Tensor]:
    """int8, and a float32 scale for each row."""
    if not factor.numel():  # a part without outputs
        return factor.to(torch.int8), factor.new_ones(len(factor))
    scales = factor.abs().amax(1) / 127
    scales[scales == 0] = 1.0
    return (factor / scales[:, None]).round().to(torch.int8), scales


def _power(factor: Tensor) -> int:
    """The power of two that brings the largest magnitude just below two to ``_TOP``."""
    largest = float(factor.abs().max()) if factor.numel() else 0.0
    if largest == 0.0 or not math.isfinite(largest):
        return 0
    return max(min(_TOP - math.frexp(largest)[1], 126), -126)
