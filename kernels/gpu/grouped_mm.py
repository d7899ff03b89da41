"""Prompts of experts with 16-bit float weights by torch's ``grouped_mm``, which calls the vendor's
library.

It is chosen only for shapes for which the card's table says from how many rows of an expert on it
is faster (``libraries`` in ``tuning.py``). Fewer rows, and experts that do not lie at equal
distances in one memory, are multiplied by ``product_dense.py``. The library reads the ends of the
experts' rows on the card, so that a step with it can be captured; it wants the rows of each expert
side by side, and writes results of the weights' type, so rows are gathered and results copied, some
at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn import functional

from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.dense import DenseLinear, library_rounds
from sdk.kernels.gpu.expert_tiles import Experts
from sdk.kernels.gpu.launch import expect_on_device
from sdk.kernels.gpu.scratch import grouped_rows, runs
from sdk.kernels.gpu.tuning import NOT_FASTER, Tuning
from sdk.kernels.operators.routes import Routes
from sdk.kernels.weights.layouts import Dense, Layout

TYPES = ("bfloat16", "float16")
#: Rows and columns of a weight must be a multiple of this: the library reads 16 bytes at a time.
_ALIGNED = 8
#: The cards, by compute capability, on which torch's product does not wait for the host: those of
#: its own kernels, for bfloat16. Elsewhere it copies the ends of the rows to the host.
_OWN_KERNELS = (9, 10)
#: The allowed distance from float64, as a share of the norm: rounding to bfloat16 is at 0.002, a
#: row of another expert above 0.1.
_LIMIT = 5e-3
#: Rows of a weight in the check, and those of its experts: one has none, one a tile and more.
_CHECKED, _CHECKED_ROWS = 2048, (5, 0, 130, 1)


@dataclass(frozen=True, slots=True)
class StackedExperts(Experts[Dense]):
    """Weights in one memory, ``step`` elements from one to the next.

    The memory may become another one: offloaded layers move while others are loaded
    (``host_layers.py``).
    """

    step: int

    @property
    def values(self) -> Tensor:
        """``[E, N, K]``, where the weights are now."""
        first = self.first.values
        strides = (self.step, *first.stride())
        return first.as_strided((self.count, *first.shape), strides, first.storage_offset())


class GroupedMM(DenseLinear):
    """See :class:`sdk.kernels.backend.LinearKernel` and the module."""

    def __init__(self, tuning: Tuning, device: torch.device, *, fixed: bool = False) -> None:
        super().__init__(fixed=fixed)
        self._tuning = tuning
        self._device = device
        self._checked: set[tuple[torch.dtype, tuple[int, int]]] = set()
        self.name = "gpu.grouped_mm"

    def tuned(self, tuning: Tuning) -> GroupedMM:
        """This kernel with another table."""
        return GroupedMM(tuning, self._device, fixed=self._fixed)

    def reject(self, problem: Problem) -> str | None:
        if problem.layout != "dense" or problem.format not in TYPES:
            return f"{problem.format} {problem.layout}: expected dense {', '.join(TYPES)}"
        if problem.out_features % _ALIGNED or problem.in_features % _ALIGNED:
            found = f"{problem.out_features} x {problem.in_features}"
            return f"{found}: expected multiples of {_ALIGNED}"
        if not hasattr(functional, "grouped_mm"):
            return f"torch {torch.__version__} has no grouped_mm"
        if (why := waits_for_host(self._device, problem.format)) is not None:
            return why
        if self._from(problem.format, (problem.out_features, problem.in_features)) is None:
            return NOT_FASTER
        return super().reject(problem)

    def pack(self, layout: Layout) -> Dense:
        """:raises KernelError: the library multiplies this shape wrongly."""
        packed = super().pack(layout)
        key = packed.values.dtype, packed.shape
        if key not in self._checked:
            check(packed.values)
            self._checked.add(key)
        return packed

    def group(self, packed: Sequence[Dense]) -> Experts[Dense] | None:
        """Moves weights that have memory of their own into one; they stay those of ``packed``."""
        step = step_of([p.values for p in packed])
        group = super().group(packed)
        if group is None or step is None:
            return group
        return StackedExperts(group.weights, group.offsets, step)

    def matmul_routed(
        self, group: Experts[Dense], x: Tensor, routes: Routes, by_token: bool, out: Tensor
    ) -> None:
        start = self._from(str(group.first.values.dtype), group.first.shape)
        many = start is not None and out.shape[0] // group.count >= start
        whole = routes.experts is None and isinstance(group, StackedExperts)
        if not many or not whole or library_rounds(group.first.values.dtype):
            super().matmul_routed(group, x, routes, by_token, out)
            return
        assert isinstance(group, StackedExperts)
        expect_on_device("linear of experts", x, out, group.first.values)
        multiply_grouped(group.values, x, routes, by_token, out)

    def _from(self, dtype: str, shape: tuple[int, int]) -> int | None:
        name = dtype.removeprefix("torch.")
        return self._tuning.libraries.get(("grouped_mm", name, *shape))


def waits_for_host(device: torch.device, dtype: str) -> str | None:
    """Why torch's product would read lengths on the host, which a captured step cannot do."""
    if device.type == "cpu":  # the interpreter
        return None
    if torch.version.hip is not None:
        return "on AMD's cards torch's product of experts waits for the host"
    major, minor = torch.cuda.get_device_capability(device)
    if major in _OWN_KERNELS and dtype == "bfloat16":
        return None
    return (
        f"{dtype} on compute capability {major}.{minor}: torch's product of experts waits for the "
        f"host, but for bfloat16 on {', '.join(f'{n}.x' for n in _OWN_KERNELS)}"
    )


def multiply_grouped(w: Tensor, x: Tensor, routes: Routes, by_token: bool, out: Tensor) -> None:
    """``out [R, N]`` of the experts ``w [E, N, K]``; x is rounded to their type."""
    x = x.to(w.dtype)
    ends = routes.starts[1:]
    for rows in runs(out.shape[0], grouped_rows(*w.shape[1:])):
        given = x.index_select(0, routes.tokens[rows]) if by_token else x[rows]
        # of an expert the rows before and behind these are not there
        own = (ends - rows.start).clamp_(0, rows.stop - rows.start)
        out[rows] = functional.grouped_mm(given, w.transpose(1, 2), offs=own)


def step_of(values: Sequence[Tensor]) -> int | None:
    """Elements from each weight to the next at equal distances in one memory. Those with memory of
    their own are moved there first; None if they are parts of some other."""
    first = values[0]
    if any(v.dtype != first.dtype or v.shape != first.shape for v in values):
        return None
    if any(not v.is_contiguous() for v in values):
        return None
    memory = first.untyped_storage().data_ptr()
    if len(values) > 1 and all(v.untyped_storage().data_ptr() == memory for v in values):
        return _at_equal_distances(values)
    if any(v.untyped_storage().nbytes() != v.nbytes for v in values):
        return None
    whole = torch.empty(len(values), *first.shape, dtype=first.dtype, device=first.device)
    for number, value in enumerate(values):
        whole[number].copy_(value)
        value.data = whole[number]  # and its own memory is free
    return first.numel()


def _at_equal_distances(values: Sequence[Tensor]) -> int | None:
    offsets = [int(v.storage_offset()) for v in values]
    step = offsets[1] - offsets[0]
    equal = all(b - a == step for a, b in pairwise(offsets))
    return step if equal and step >= values[0].numel() and step % _ALIGNED == 0 else None


def check(values: Tensor) -> None:
    """Compare the library's product of experts of this shape with float64.

    :raises KernelError: they differ.
    """
    part = values[: min(len(values), _CHECKED)]
    w = torch.stack([part, part.flip(0), part.flip(1), part.neg()])
    random = torch.Generator().manual_seed(part.shape[1])
    x = torch.randn(sum(_CHECKED_ROWS), part.shape[1], generator=random)
    x = x.to(values.device, values.dtype)
    ends = torch.tensor(_CHECKED_ROWS).cumsum(0).to(values.device, torch.int32)
    found = functional.grouped_mm(x, w.transpose(1, 2), offs=ends).double()
    each = zip(x.double().split(_CHECKED_ROWS), w.double(), strict=True)
    right = torch.cat([rows @ one.t() for rows, one in each])
    away = float((found - right).norm() / right.norm())
    if not away <= _LIMIT:
        raise KernelError(f"grouped_mm: {away:.3g} of the norm from float64")
