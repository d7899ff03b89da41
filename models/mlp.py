"""The MLP of a layer, its experts, or both."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast

from sdk.kernels.operators.norm import Norm
from sdk.models.architecture import ExpertsBeside, LayerRules
from sdk.models.experts.moe import ExpertMLP
from sdk.models.rank_norms import SubNorm
from sdk.quant.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.operators.rounding import Rounding, Rows
    from sdk.kernels.operators.states import LayerState
    from sdk.models.configs.config import ModelConfig
    from sdk.models.mixers.attention import Step
    from sdk.models.projections import Projection
    from sdk.models.source import Source


class MLP:
    """``down(act(gate(x)) * up(x))``, or ``down(act(up(x)))`` if it is not ``gated``.

    ``width``: its features, if they are not the model's. ``sub_norm``: the norm ``ffn_sub_norm``
    comes before ``down``. ``limit``: the activation of the gate and
    ``up(x)`` are clamped to this size. Without ``reduce`` a rank's result is its
    part of the sum over ranks.
    """

    def __init__(
        self,
        source: Source,
        path: str,
        width: int | None = None,
        *,
        gated: bool = True,
        reduce: bool = True,
        limit: float | None = None,
        sub_norm: bool = False,
    ) -> None:
        c = source.config
        self.ops, self.limit = source.ops, limit
        self.activation, self.slope = c.activation, c.activation_slope
        self.gated = gated
        self.numbers = xielu_numbers(source, path) if c.activation == "xielu" else ()
        width = width or c.intermediate_size
        start, count = source.mesh.columns(width)
        self.gate_factor, self.factor = c.mlp_factors
        names = ("gate_proj", "up_proj") if gated else ("up_proj",)
        parts = [(name, width, start, count) for name in names]
        #: The projection to the gate, where that is multiplied or clamped: ``up`` lacks it then.
        self.gate: Projection | None = None
        if self.gate_factor != 1.0 or limit is not None:
            gate, *parts = parts
            self.gate = source.columns(path, "gate_proj", [gate], bias=c.mlp_bias)
        fused = "gate_up_proj" if len(parts) == 2 else "up_proj"
        self.up = source.columns(path, fused, parts, bias=c.mlp_bias)
        down = f"{path}.down_proj"
        self.down = source.row(down, width, start, count, bias=c.down_bias, reduce=reduce)
        self.sub_norm: SubNorm | None = None
        if sub_norm:
            self.sub_norm = SubNorm(source, f"{path}.ffn_sub_norm", width, start, count)

    @property
    def rounding(self) -> Rounding | None:
        """See :class:`Projection`."""
        return self.up.rounding

    def __call__(self, x: Rows) -> Tensor:
        y = self._wide(x)
        if self.sub_norm is not None:
            y = self.sub_norm(y)
        return self.ops.scale(self.down(y), self.factor)

    def _wide(self, x: Rows) -> Tensor:
        """Between the first projections and the last one: ``[T, this rank's features]``."""
        if self.gate is not None and self.limit is not None:
            gate = self.ops.activation(self.gate(x), self.activation)
            gate = self.ops.clamp(self.ops.scale(gate, self.gate_factor), self.limit)
            return self.ops.gate(self.ops.clamp(self.up(x), self.limit), gate, "linear")
        if self.gate is not None:
            gate = self.ops.scale(self.gate(x), self.gate_factor)
            return self.ops.gate(self.up(x), gate, "silu")
        if self.gated:
            return self.up.gated(x, self.activation)
        y = self.ops.scale(self.up(x), self.slope)
        y = self.ops.activation(y, self.activation, numbers=self.numbers)
        return self.ops.scale(y, 1 / self.slope)


class ShiftedMLP:
    """An MLP without a gate, whose input is mixed with that of the token before."""

    def __init__(self, source: Source, path: str, width: int, *, reduce: bool) -> None:
        from sdk.models.mixers.mixer import shift_weight  # no other MLP needs it

        self.ops = source.ops
        values, hidden = source.plain(f"{path}.shift"), source.config.hidden_size
        self.shift = shift_weight(source, values, 1, hidden, f"{path}.shift")[0]
        self.mlp = MLP(source, path, width, gated=False, reduce=reduce)

    @property
    def rounding(self) -> Rounding | None:
        """See :class:`sdk.models.projections.Projection`: tokens are mixed first."""
        return None

    def __call__(self, x: Rows, step: Step, cache: LayerState) -> Tensor:
        state, x = cache["mlp_shift"], cast("Tensor", x)  # see `rounding`
        mixed = self.ops.states.causal_conv(x, self.shift, None, state, step.batch)
        return self.mlp(mixed)


class MLPBesideExperts:
    """See :class:`sdk.models.architecture.ExpertsBeside`."""

    def __init__(
        self, source: Source, path: str, index: int, rules: LayerRules, norms: ExpertsBeside
    ) -> None:
        c = source.config
        self.ops = source.ops
        self.mlp = MLP(source, f"{path}.mlp", c.width_of(index), gated=rules.gated)
        self.experts = ExpertMLP(source, f"{path}.mlp", rules)
        self.before = source.norm(f"{path}.{norms.before}")
        self.after = source.norm(f"{path}.{norms.after}")
        self.after_mlp = source.norm(f"{path}.{norms.after_mlp}")
        scale = source.vector(f"{path}.mlp.{rules.router}.scale", c.hidden_size)
        self.routed = Norm(scale * c.hidden_size**-0.5, c.norm_eps)

    @property
    def rounding(self) -> Rounding | None:
        """See :class:`Projection`."""
        return self.mlp.rounding

    def __call__(self, x: Rows, total: Tensor) -> Tensor:
        """x: the norm of ``total``, the sum of everything before."""
        y = self.ops.norm(self.mlp(x), self.after_mlp)
        routed = self.ops.norm(total, self.routed)
        own = self.experts(self.ops.norm(total, self.before), routed)
        return self.ops.add(y, self.ops.norm(own, self.after))


def xielu_numbers(source: Source, path: str) -> tuple[float, float, float, float]:
    """What the activation of an MLP takes: see :meth:`sdk.kernels.operators.ops.Ops.activation`."""
    names = ("alpha_p", "alpha_n", "beta", "eps")
    alpha_p, alpha_n, beta, eps = (
        float(source.vector(f"{path}.act_fn.{name}", 1)[0]) for name in names
    )
    if not (eps <= 0 and all(map(math.isfinite, (alpha_p, alpha_n, beta, eps)))):
        found = f"alpha_p {alpha_p:g}, alpha_n {alpha_n:g}, beta {beta:g}, eps {eps:g}"
        raise CheckpointError(f"{path}.act_fn: expected numbers, eps at most 0, found {found}")
    return _softplus(alpha_p), beta + _softplus(alpha_n), beta, eps


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def has_experts(config: ModelConfig, layer: int) -> bool:
    return config.experts is not None and config.experts.layers[layer]


def mlp_of(
    source: Source, path: str, index: int, rules: LayerRules, *, reduce: bool
) -> MLP | ExpertMLP | MLPBesideExperts | ShiftedMLP:
    """The MLP of layer ``index``, its experts, or both. ``reduce``: see :class:`MLP`."""
    c = source.config
    if has_experts(c, index):
        if rules.experts_beside is not None:
            return MLPBesideExperts(source, path, index, rules, rules.experts_beside)
        return _experts(source, f"{path}.mlp", index, rules)
    if rules.shifted_mlp:
        return ShiftedMLP(source, f"{path}.mlp", c.width_of(index), reduce=reduce)
    return MLP(
        source,
        f"{path}.{rules.dense}",
        c.width_of(index),
        gated=rules.gated,
        reduce=reduce,
        limit=c.mlp_limit(index),
        sub_norm=rules.sub_norms,
    )


def _experts(source: Source, path: str, index: int, rules: LayerRules) -> ExpertMLP:
    """The experts of a layer, with the shared ones."""
    c, spec = source.config, source.config.experts
    assert spec is not None
    shared = None
    if spec.shared_width:
        whole = source.mesh.redundant_experts is not None or spec.inputs is not None
        where, width, limit = f"{path}.shared_experts", spec.shared_width, c.mlp_limit(index)
        shared = MLP(source, where, width, gated=rules.gated, reduce=whole, limit=limit)
    return ExpertMLP(source, path, rules, shared, limit=c.expert_limit(index))
