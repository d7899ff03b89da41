"""Matrix products of a model. One :class:`Projection` serves every weight format; only the weight
knows its layout."""

from __future__ import annotations

from collections.abc import Sequence

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.mlp_activations import Activation
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.rounding import Rounding, Rows
from sdk.kernels.operators.routes import Routes
from sdk.models.configs.config import ModelConfig
from sdk.models.head_projection import HeadProjection
from sdk.models.parallel import Mesh
from sdk.models.parts import Adapters, Matrix, Part
from sdk.quant.expert_weights import ExpertWeights
from sdk.quant.weight import Weight


class Projection:
    """``y = x @ w.T + bias``; with ``reduce`` the products of all ranks are summed first.

    ``parts``: the matrices of the checkpoint that it multiplies with. ``adapters`` add to the
    product of rows that have one; without adapters nothing is run or recorded. ``narrow``: only
    another kernel reads y, so it has the type of activations
    (:attr:`sdk.kernels.operators.ops.Ops.activations`); else y is float32. ``matrix.order``: see
    :class:`Matrix`. ``part_of_sum``: the products of all ranks are summed, here or by the caller.
    """

    def __init__(
        self,
        matrix: Matrix,
        mesh: Mesh,
        ops: Ops,
        *,
        parts: Sequence[Part] = (),
        reduce: bool = False,
        narrow: bool = False,
    ) -> None:
        self.ops = ops
        self.weight, self.bias, self.order = matrix
        self.parts = tuple(parts)
        self.mesh = mesh
        self.reduce = reduce
        self.part_of_sum = False
        self.narrow = narrow and ops.activations != torch.float32
        self.adapters: Adapters | None = None

    @property
    def matrix(self) -> Matrix:
        """What it multiplies with and adds."""
        return Matrix(self.weight, self.bias, self.order)

    @property
    def rounding(self) -> Rounding | None:
        """How it takes rows as codes. ``None``: it needs floats, as adapters do."""
        return None if self._adapters else self.weight.rounding

    @property
    def _adapters(self) -> tuple[Adapters, Tensor] | None:
        """Adapters, and the slot of each row's own, if there are any."""
        slots = self.ops.adapter_slots
        return None if self.adapters is None or slots is None else (self.adapters, slots)

    def __call__(self, x: Rows, out: Tensor | None = None) -> Tensor:
        """``x [T, in] -> [T, out]``, into ``out`` if given."""
        y = self.weight.matmul(x, self._out(x, self.weight.shape[0]) if out is None else out)
        if (adapters := self._adapters) is not None:
            assert isinstance(x, Tensor)
            adapters[0].add(x, y, adapters[1])
        if self.reduce and self.mesh.group is not None:
            self.ops.all_reduce(y, self.mesh.group)
        if self.bias is not None:
            self.ops.add_bias(y, self.bias)
        return y if self.order is None else self.ops.take_columns(y, self.order)

    def gated(self, x: Rows, activation: Activation) -> Tensor:
        """``act(gate) * up`` of a projection to gate, then up: ``[T, out / 2]``.

        One kernel, if it can do both and nothing is added to gate and up.
        """
        if self._adapters or self.bias is not None or not self.weight.gates:
            return self.ops.gated_activation(self(x), activation)
        return self.weight.matmul(x, self._out(x, self.weight.shape[0] // 2), activation)

    def _out(self, x: Rows, width: int) -> Tensor | None:
        """Memory for the result, if that has the type of activations."""
        if not self.narrow:
            return None
        return self.ops.empty(x.shape[0], width, dtype=self.ops.activations)


class ExpertProjection:
    """``y[r] = x[r] @ w[expert of r].T + bias[expert of r]``, rows in the order of the experts.

    ``by_token``: x has one row per token instead. ``bias``: float32 ``[E, N]``.
    """

    def __init__(
        self, weight: ExpertWeights, bias: Tensor | None, ops: Ops, *, by_token: bool
    ) -> None:
        self.ops = ops
        self.weight = weight
        self.bias = bias
        self.by_token = by_token

    @property
    def matrix(self) -> Matrix:
        """What it multiplies with and adds."""
        return Matrix(self.weight, self.bias)

    def __call__(self, x: Tensor, routes: Routes) -> Tensor:
        """See :meth:`sdk.quant.expert_weights.ExpertWeights.matmul_routed`."""
        y = self.weight.matmul_routed(x, routes, by_token=self.by_token)
        if self.bias is not None:
            self.ops.moe.add_owners_bias(y, self.bias, routes)
        return y

    def gated(self, x: Tensor, routes: Routes, activation: Activation) -> Tensor:
        """See :meth:`Projection.gated`: ``[R, out / 2]``."""
        if self.bias is not None or not self.weight.gates:
            return self.ops.gated_activation(self(x, routes), activation, routes.used)
        return self.weight.matmul_routed(x, routes, by_token=self.by_token, activation=activation)

    def replace(self, index: int, weight: Weight, bias: Tensor | None) -> None:
        """Exchange one expert for another of the same checkpoint."""
        self.weight.replace(index, weight)
        if self.bias is not None:
            assert bias is not None
            self.bias[index] = bias


#: All kinds of projections.
Linear = Projection | ExpertProjection | HeadProjection


class Head:
    """Hidden states to logits over the whole vocabulary."""

    def __init__(self, linear: Projection, config: ModelConfig) -> None:
        self.linear = linear
        self.vocab_size = config.vocab_size
        self.scale = config.logits_scale
        self.softcap = config.final_softcap

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """``[R, hidden] -> [R, vocab]``, float32; ``out``: see :meth:`Decoder.logits`."""
        mesh = self.linear.mesh
        logits = self.linear(hidden, out)
        if mesh.group is not None:
            width = -(-self.vocab_size // mesh.size)  # of each rank, but for the last
            logits = self.linear.ops.all_gather(logits, mesh.group, width, self.vocab_size)
        logits = self.linear.ops.scale(logits, 1.0 / self.scale)
        if self.softcap is not None:
            logits = self.linear.ops.softcap(logits, self.softcap)
        return logits
