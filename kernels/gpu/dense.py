"""Products with plain weights: the library's, which needs no help from us."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sdk.kernels.experts import Routes
from sdk.kernels.layouts import Dense, Layout
from sdk.kernels.registry import Problem

_TYPES = ("float32", "float16", "bfloat16")


class DenseLinear:
    """See :class:`sdk.kernels.registry.LinearKernel`.

    x is rounded to the weight's type; ``fixed``: the library's order of additions depends on the
    number of tokens, so nothing is accepted.
    """

    name = "gpu.dense"

    def __init__(self, *, fixed: bool = False) -> None:
        self._fixed = fixed

    def reject(self, problem: Problem) -> str | None:
        if problem.layout != "dense" or problem.format not in _TYPES:
            return f"{problem.format} {problem.layout}: expected dense {', '.join(_TYPES)}"
        if self._fixed:
            return "the library's order of additions depends on the batch"
        if problem.compute == "exact" and problem.format != "float32":
            return f"rounds activations to {problem.format}, compute is exact"
        return None

    def pack(self, layout: Layout) -> Dense:
        assert isinstance(layout, Dense)
        return layout

    def unpack(self, packed: Dense) -> Layout:
        return packed

    def nbytes(self, packed: Dense) -> int:
        return packed.nbytes

    def matmul(self, packed: Dense, x: Tensor, out: Tensor) -> None:
        multiply(x.to(packed.values.dtype), packed.values, out)

    def rows(self, packed: Dense, ids: Tensor, out: Tensor) -> None:
        out.copy_(packed.values[ids])

    def group(self, packed: Sequence[Dense]) -> Sequence[Dense]:
        return tuple(packed)

    def matmul_routed(
        self, group: Sequence[Dense], x: Tensor, routes: Routes, by_token: bool, out: Tensor
    ) -> None:
        for expert, rows, own in routes.parts(x, by_token):
            self.matmul(group[expert], own, out[rows])


def multiply(x: Tensor, w: Tensor, out: Tensor) -> None:
    """``out = x @ w.T`` with x and w of one type; on a GPU the sums are not rounded to it."""
    if x.is_cuda and x.dtype != torch.float32:
        out.copy_(torch.mm(x, w.t(), out_dtype=torch.float32))
    else:
        out.copy_(torch.mm(x, w.t()))
