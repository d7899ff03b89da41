"""Products with 4- and 8-bit weights by the package ``humming-kernels``, for two tokens and more.

It is chosen only where the package is installed and the card's table says from how many tokens on
it is faster (``libraries`` in ``tuning.py``). The package has a layout of its own, so a weight is
in memory twice: ours is used for one token, for float32 results, which the package rounds to 16
bits, and for what the package does not take. Memory plans count both (``CardScratch.kept``).

The package compiles a kernel for each shape when it is first used, with NVRTC or nvcc, and keeps it
in a cache of its own. It has not run on a card here: tests have a stand-in for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.expert_tiles import Experts
from sdk.kernels.gpu.linear import TritonLinear, activate_rows, before_activation
from sdk.kernels.gpu.packing import Packed
from sdk.kernels.gpu.tuning import NOT_FASTER, type_of
from sdk.kernels.operators.rounding import Rows
from sdk.kernels.packages import install
from sdk.kernels.weights.layouts import Affine, Layout

BITS = (4, 8)
#: Rows and columns of a weight must be a multiple of these for the package (its ``transform.py``).
_ROWS, _COLUMNS = 64, 32
#: Words with which its programs wait for each other, of each weight, as in its own layer.
_LOCKS = 2048
#: The allowed distance from float64, as a share of the norm: rounding the result to bfloat16 is at
#: 0.002, a wrong order of codes or scales above 0.1.
_LIMIT = 5e-3
#: Tokens, and rows of a weight, that are compared.
_CHECKED, _CHECKED_ROWS = 24, 64


@dataclass(frozen=True, slots=True)
class HummingWeight:
    """A weight twice: ours, and the module with the package's tensors, in 16-bit ``dtype``."""

    own: Packed
    layer: torch.nn.Module
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        tensors = [*self.layer.parameters(), *self.layer.buffers()]
        return self.own.nbytes + sum(x.nbytes for x in tensors)


class HummingLinear(TritonLinear):
    """See :class:`sdk.kernels.backend.LinearKernel` and the module."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._checked: set[tuple[str, tuple[int, int]]] = set()
        self.name = "gpu.humming"

    def reject(self, problem: Problem) -> str | None:
        if problem.layout != "affine" or problem.format or problem.bits not in BITS:
            found = f"{problem.bits or ''} {problem.format} {problem.layout}".split()
            return f"{' '.join(found)}: expected affine integers of {BITS} bits"
        if problem.super_group:
            return "two levels of scales"
        if self._fixed:
            return "the library's order of additions depends on the batch"
        if problem.out_features % _ROWS or problem.in_features % _COLUMNS:
            found_shape = f"{problem.out_features} x {problem.in_features}"
            return f"{found_shape}: expected multiples of {_ROWS} x {_COLUMNS}"
        if problem.in_features % problem.group and problem.group < problem.in_features:
            return f"groups of {problem.group}: expected whole ones in {problem.in_features}"
        if torch.version.hip is not None:
            return "humming-kernels has none for AMD's cards"
        if not installed():
            return f"humming-kernels is not installed: {install('humming')}"
        kind = f"int{problem.bits}g{problem.group}"
        if self._from(kind, (problem.out_features, problem.in_features)) is None:
            return NOT_FASTER
        return super().reject(problem)

    def pack(self, layout: Layout) -> Packed | HummingWeight:  # type: ignore[override]
        """Ours alone where the package would change values: scales that are not exact in 16 bits,
        zero points, signed codes.

        :raises KernelError: the package multiplies this shape wrongly.
        """
        own = super().pack(layout)
        assert isinstance(layout, Affine)
        scale = layout.scale.to(self.dtype)
        if not _takes(layout) or not torch.equal(scale.float(), layout.scale.float()):
            return own
        packed = HummingWeight(own, layer_of(layout, scale), self.dtype)
        key = type_of(own), own.shape
        if key not in self._checked:
            self._check(packed)
            self._checked.add(key)
        return packed

    def unpack(self, packed: Packed | HummingWeight) -> Layout:
        return super().unpack(_own(packed))

    def nbytes(self, packed: Packed | HummingWeight) -> int:
        return packed.nbytes

    def op_of(self, packed: Packed | HummingWeight) -> str:
        return "linear"

    def matmul(
        self, packed: Packed | HummingWeight, x: Rows, out: Tensor, activation: str = ""
    ) -> None:
        if not isinstance(packed, HummingWeight):
            super().matmul(packed, x, out, activation)
            return
        assert isinstance(x, Tensor)
        start = self._from(type_of(packed.own), packed.own.shape)
        same = x.dtype == out.dtype == packed.dtype and out.is_contiguous()
        if start is None or x.shape[0] < max(2, start) or not same:
            super().matmul(packed.own, x, out, activation)
            return
        wide = before_activation(out, activation)
        multiply(packed.layer, x, wide)
        activate_rows(wide, activation, out)

    def rows(self, packed: Packed | HummingWeight, ids: Tensor, out: Tensor) -> None:
        super().rows(_own(packed), ids, out)

    def group(self, packed: Sequence[Packed | HummingWeight]) -> Experts[Packed] | None:
        """Experts are ours."""
        return super().group([_own(one) for one in packed])

    def _from(self, kind: str, shape: tuple[int, int]) -> int | None:
        return self._tuning.libraries.get(("humming", kind, *shape))

    def _check(self, packed: HummingWeight) -> None:
        """:raises KernelError: the package's product differs from that of the weight's values."""
        (n, k), device = packed.own.shape, packed.own.scale.device
        random = torch.Generator().manual_seed(k)
        x = torch.randn(_CHECKED, k, generator=random).to(device, packed.dtype)
        out = torch.full((_CHECKED, n), float("nan"), dtype=packed.dtype, device=device)
        multiply(packed.layer, x, out)
        some = torch.arange(n, device=device)
        some = torch.cat([some[:_CHECKED_ROWS], some[-_CHECKED_ROWS:]])
        values = torch.empty(len(some), k, device=device)
        self.rows(packed, some, values)
        right = x.double() @ values.double().t()
        away = float((out[:, some].double() - right).norm() / right.norm())
        if not away <= _LIMIT:
            raise KernelError(f"humming-kernels: {away:.3g} of the norm from float64")


def installed() -> bool:
    return find_spec("humming") is not None


def _own(packed: Packed | HummingWeight) -> Packed:
    return packed.own if isinstance(packed, HummingWeight) else packed


def _takes(layout: Affine) -> bool:
    """Whether values are ``scale * (code - half of all codes)``, with a scale for each row."""
    other = (layout.zeros, layout.minus, layout.table, layout.super_scale, layout.scale_table)
    symmetric = layout.zero == 1 << (layout.bits - 1) and not layout.signed
    floats = layout.scale.is_floating_point() and layout.scale.itemsize > 1
    whole = layout.scale.shape[0] == layout.shape[0]
    return symmetric and floats and whole and all(part is None for part in other)


def layer_of(layout: Affine, scale: Tensor) -> torch.nn.Module:
    """The package's tensors of a weight. Its own layer is not used: that allocates them on the
    current card and starts from a weight that is not quantized yet."""
    package = import_module("humming.layer").HummingLayerMethod
    schema = import_module("humming.schema").HummingWeightSchema
    (n, k), bits = layout.shape, layout.bits
    layer = torch.nn.Module()
    words = layout.codes.contiguous().view(torch.int32)
    for name, tensor in (("weight", words), ("weight_scale", scale.contiguous())):
        setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))
    package.prepare_layer_meta(
        layer,
        shape_n=n,
        shape_k=k,
        weight_schema=schema(
            b_dtype=f"uint{bits}",
            weight_scale_group_size=0 if layout.group >= k else layout.group,
        ),
        torch_dtype=scale.dtype,
    )
    package.transform_humming_layer(layer)
    locks = torch.zeros(_LOCKS, dtype=torch.int32, device=scale.device)
    layer.register_buffer("locks", locks)
    return layer


def multiply(layer: torch.nn.Module, x: Tensor, out: Tensor) -> None:
    """``out [M, N]`` of x ``[M, K]``, both contiguous in the layer's type."""
    package = import_module("humming.layer").HummingLayerMethod
    package.forward_layer(layer, inputs=x, outputs=out)
