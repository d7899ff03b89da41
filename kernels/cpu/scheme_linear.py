"""Matrix products with activations quantized by the scheme of the weight's file (W8A8 and others).

Codes and scales equal those of kernels/reference/fake_quantize.py bit for bit
(``native/activation_schemes.hpp``). Integers and 4-bit floats become operands of the integer
products of ``native/linear_int.hpp``. The products of 8-bit floats do not fit an integer:
activations are rounded to 8-bit floats and multiplied in fp32.
"""

from __future__ import annotations

from dataclasses import replace

from sdk.kernels.backend import Problem
from sdk.kernels.cpu.library import LinearArgs, SchemeView
from sdk.kernels.cpu.packed_linear import PackedLinear
from sdk.kernels.cpu.packed_weight import TILE_DEPTH, Packed
from sdk.kernels.cpu.runtime import NativeRuntime
from sdk.kernels.cpu.weight_memory import WeightMemory
from sdk.kernels.lazy_torch import Tensor
from sdk.kernels.weights.layouts import ActivationScheme, Layout, inputs_of

#: The numbers of native/abi.hpp.
_CODES = {"int": 1, "e4m3": 2, "e2m1": 3}
_RULES = {"plain": 1, "mx": 2, "power": 3, "nv": 4, "absmax": 5}


class SchemeLinear(PackedLinear):
    """See :class:`sdk.kernels.backend.LinearKernel`; a weight without a scheme is exact."""

    def __init__(self, runtime: NativeRuntime, memory: WeightMemory) -> None:
        super().__init__(runtime, memory, 32)
        self.name = "cpu.linear_as_file"

    def reject(self, problem: Problem) -> str | None:
        return super().reject(replace(problem, inputs="", compute="exact"))

    def pack(self, layout: Layout) -> Packed:
        packed = super().pack(layout)
        scheme = inputs_of(layout)
        if scheme is not None:
            packed.view.scheme = _inputs(scheme, layout.shape[1])
        return packed

    def _arguments(self, packed: Packed, x: Tensor, out: Tensor) -> LinearArgs:
        args = super()._arguments(packed, x, out)
        scheme = inputs_of(packed.facts)
        grouped = not packed.view.dense and packed.view.subgroup > 1
        if scheme is not None and grouped and fits_integers(scheme, packed.view.k):
            args.exact, args.terms = 0, 2
        return args


def fits_integers(scheme: ActivationScheme, columns: int) -> bool:
    """Whether the codes are sums of two 8-bit integers in blocks of 32 values that share a
    scale."""
    if scheme.codes == "e4m3":
        return False
    whole = not 0 < scheme.group < columns or scheme.static is not None
    return (
        whole
        or scheme.group % TILE_DEPTH == 0
        or (scheme.floats and scheme.group == TILE_DEPTH // 2)
    )


def _inputs(scheme: ActivationScheme, columns: int) -> SchemeView:
    return SchemeView(
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
