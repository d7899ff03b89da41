"""Matrix products whose activations are rounded as the file of the weight asks for.

The codes and scales are those of kernels/reference/fake_quantize.py, bit for bit
(``native/file_rounding.hpp``). Integers and 4-bit floats become operands of the integer products of
``native/linear_int.hpp``; 8-bit floats, whose products fit no integer, are put on their grid and
multiplied in fp32.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from sdk.kernels.cpu.library import Engine, Inputs, LinearArgs
from sdk.kernels.cpu.linear import Linear
from sdk.kernels.cpu.packed_weight import DEPTH, Packed
from sdk.kernels.cpu.weight_memory import WeightMemory
from sdk.kernels.layouts import ActivationScheme, Layout, inputs_of
from sdk.kernels.registry import Problem

#: As native/abi.hpp numbers them.
_CODES = {"int": 1, "e4m3": 2, "e2m1": 3}
_RULES = {"plain": 1, "mx": 2, "power": 3, "nv": 4}


class LinearAsFile(Linear):
    """See :class:`sdk.kernels.registry.LinearKernel`; a weight without a scheme is exact."""

    def __init__(self, engine: Engine, memory: WeightMemory) -> None:
        super().__init__(engine, memory, 32)
        self.name = "cpu.linear_as_file"

    def reject(self, problem: Problem) -> str | None:
        return super().reject(replace(problem, inputs="", compute="exact"))

    def pack(self, layout: Layout) -> Packed:
        packed = super().pack(layout)
        scheme = inputs_of(layout)
        if scheme is not None:
            packed.view.inputs = _inputs(scheme, layout.shape[1])
        return packed

    def _arguments(self, packed: Packed, x: Tensor, out: Tensor) -> LinearArgs:
        args = super()._arguments(packed, x, out)
        scheme = inputs_of(packed.facts)
        grouped = not packed.view.dense and packed.view.unit > 1
        if scheme is not None and grouped and fits_integers(scheme, packed.view.k):
            args.exact, args.planes = 0, 2
        return args


def fits_integers(scheme: ActivationScheme, columns: int) -> bool:
    """The codes are sums of two 8-bit integers in records of 32 values that share a scale."""
    if scheme.codes == "e4m3":
        return False
    whole = not 0 < scheme.group < columns or scheme.static is not None
    return whole or scheme.group % DEPTH == 0 or (scheme.floats and scheme.group == DEPTH // 2)


def _inputs(scheme: ActivationScheme, columns: int) -> Inputs:
    return Inputs(
        codes=_CODES[scheme.codes],
        rule=0 if scheme.static is not None else _RULES[scheme.rule],
        bits=scheme.bits,
        symmetric=scheme.symmetric,
        group=min(scheme.group or columns, columns),
        scale=scheme.static or 0.0,
        zero=scheme.zero,
        factor=scheme.factor,
        limit=scheme.limit,
    )
