"""The names of activations of an MLP and of gates, for operators and backends."""

from __future__ import annotations

from typing import Literal

#: ``clamped_swiglu`` is gpt-oss' gate, ``relu2`` is ``relu(x)^2``, ``xielu`` is of Apertus:
#: kernels/reference/norm.py defines them.
Activation = Literal["silu", "gelu_tanh", "gelu", "clamped_swiglu", "relu", "relu2", "xielu"]
#: Those that change ``up`` too, so that there is none without a gate.
ALWAYS_GATED = ("clamped_swiglu",)
#: How many numbers an activation takes, which a layer has as tensors; the others take none.
NUMBERS = {"xielu": 4}
#: What a gate is a function of: see :meth:`sdk.kernels.operators.ops.Ops.gate`.
GateKind = Literal["sigmoid", "softplus", "silu", "linear"]
GATES: tuple[GateKind, ...] = ("sigmoid", "softplus", "silu", "linear")
