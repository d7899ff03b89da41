"""Products whose activations are rounded as the file of the weight asks for.

The rounding is kernels/reference/rounding.py, some passes over x on the card; the product is
``linear.py``'s in float32 (tolerance: its own, 1e-6), because scale times code needs more bits than
16-bit operands have.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sdk.kernels.gpu.linear import Linear
from sdk.kernels.gpu.packing import Packed
from sdk.kernels.gpu.tuning import Tuning
from sdk.kernels.layouts import inputs_of
from sdk.kernels.reference.rounding import rounded
from sdk.kernels.registry import Problem


class LinearAsFile(Linear):
    """See :class:`sdk.kernels.registry.LinearKernel`; a weight without a scheme is exact."""

    def __init__(self, tuning: Tuning, *, fixed: bool = False) -> None:
        super().__init__(torch.float32, tuning, fixed=fixed)
        self.name = "gpu.linear_as_file"

    def reject(self, problem: Problem) -> str | None:
        return super().reject(replace(problem, inputs="", compute="exact"))

    def matmul(self, packed: Packed, x: Tensor, out: Tensor) -> None:
        scheme = inputs_of(packed.facts)
        super().matmul(packed, x if scheme is None else rounded(x.float(), scheme), out)
