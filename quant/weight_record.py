"""Bound weights as plain values, and back: how the packed parts of a matrix belong together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from sdk.kernels.lazy_torch import Tensor
from sdk.kernels.operators.ops import Ops
from sdk.kernels.weights.bound import BoundLinear
from sdk.quant.expert_weights import ExpertWeights
from sdk.quant.permuted import PermutedWeight
from sdk.quant.spec import QuantSpec
from sdk.quant.weight import PackedWeight, StackedWeight, Weight

Record = dict[str, Any]


class KeptWeight(PackedWeight):
    """A weight that was packed by another engine and kept."""

    def __init__(self, bound: BoundLinear, spec: QuantSpec, inputs: str) -> None:
        self.shape = bound.shape
        self.inputs = inputs
        self._layout, self._bound, self._spec = None, bound, spec

    @property
    def spec(self) -> QuantSpec:
        return self._spec


def record_of(
    weight: Weight,
    packed: Callable[[BoundLinear], Any],
    small: Callable[[Tensor], Any],
) -> Record | None:
    """The record of a bound weight. ``packed`` and ``small`` give what stands for a packed part and
    for a small tensor; ``None`` from ``packed``: it cannot be kept, and so neither can the weight.
    """
    match weight:
        case PackedWeight():
            found = packed(weight.bound)
            spec = {one.name: getattr(weight.spec, one.name) for one in fields(QuantSpec)}
            return None if found is None else {"packed": found, "spec": spec, "in": weight.inputs}
        case PermutedWeight():
            inner = record_of(weight.inner, packed, small)
            return None if inner is None else {"permuted": inner, "order": small(weight.order)}
        case StackedWeight():
            parts = [record_of(part, packed, small) for part in weight.parts]
            name = "experts" if isinstance(weight, ExpertWeights) else "parts"
            return None if None in parts else {name: parts}
        case _:
            return None


def weight_of_record(
    record: Mapping[str, Any],
    ops: Ops,
    packed: Callable[[Any], BoundLinear],
    small: Callable[[Any], Tensor],
) -> Weight:
    """The inverse of :func:`record_of`. Raises what ``packed`` and ``small`` raise."""
    if "packed" in record:
        return KeptWeight(packed(record["packed"]), QuantSpec(**record["spec"]), record["in"])
    if "permuted" in record:
        inner = weight_of_record(record["permuted"], ops, packed, small)
        found: Weight = PermutedWeight(inner, small(record["order"]))
    else:
        name = "experts" if "experts" in record else "parts"
        parts = [weight_of_record(part, ops, packed, small) for part in record[name]]
        found = ExpertWeights(parts) if name == "experts" else StackedWeight(parts)
    found.bind(ops)  # the parts are bound
    return found
