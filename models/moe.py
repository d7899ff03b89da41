"""A mixture of experts (MoE) instead of an MLP: a router selects a few small MLPs per token.

``y = sum over the selected experts e of weight[e] * down[e](act(gate[e](x)) * up[e](x))``. With
tensor parallelism every rank has a part of each expert, as of an MLP, and routes by itself: inputs
have the same bits on all ranks, so all ranks select the same experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.models.layers import Source


class ExpertMLP:
    """``router``: its name, next to that of the experts."""

    def __init__(self, source: Source, path: str, router: str = "gate") -> None:
        c = source.config
        assert c.experts is not None
        self.ops = source.ops
        self.mesh = source.mesh
        self.spec = c.experts
        self.activation = c.activation
        self.router = source.router(f"{path}.{router}", self.spec.count)
        cut = source.mesh.columns(self.spec.width)
        self.gate_up = source.expert_columns(f"{path}.experts", ("gate_proj", "up_proj"), *cut)
        self.down = source.expert_rows(f"{path}.experts", "down_proj", *cut)

    def __call__(self, x: Tensor) -> Tensor:
        """``[T, hidden] -> [T, hidden]``, float32."""
        spec = self.spec
        routes = self.ops.moe.route(self.router(x), spec.per_token, normalized=spec.normalized)
        hidden = self.ops.gated_activation(self.gate_up(x, routes), self.activation)
        y = self.ops.moe.combine(self.down(hidden, routes), routes)
        return y if self.mesh.group is None else self.ops.all_reduce(y, self.mesh.group)
