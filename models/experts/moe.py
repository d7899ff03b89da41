"""A mixture of experts (MoE) instead of an MLP: a router selects a few small MLPs per token.

``y = sum over the selected experts e of weight[e] * down[e](act(gate[e](x)) * up[e](x))``, of
models without gates ``down[e](act(up[e](x)))``, plus an MLP of shared experts, which every token
uses. Experts may read and return fewer features than the model has, between two projections that
they share ("latent" experts).

Every rank routes by itself: inputs have the same bits on all ranks, so all ranks select the same
experts. With tensor parallelism a rank has a part of each expert, as of an MLP, and the ranks'
results are summed. With expert parallelism (:mod:`sdk.models.experts.parallel`) it has whole
experts, and the ranks exchange the rows that these have computed. With data parallel attention the
ranks, each of which has tokens of its own, gather the tokens of all before. The shared experts are
split like any MLP; without tensor parallelism a rank computes them for its own tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from sdk.kernels.lazy_torch import torch
from sdk.quant.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.operators.rounding import Rows
    from sdk.models.architecture import LayerRules
    from sdk.models.experts.placement import Placement
    from sdk.models.projections import ExpertProjection, Projection
    from sdk.models.source import Source
    from sdk.quant.weight import Weight

_GATE = ("gate_proj",)
_GATE_UP = ("gate_proj", "up_proj")
_UP = ("up_proj",)


def _route_bias(source: Source, path: str, count: int) -> Tensor | None:
    """The bias of the choice of the router ``path``; GGUF files may have none."""
    name = f"{path}.e_score_correction_bias"
    if source.checkpoint.format == "gguf" and not source.has(name):
        return None
    return source.vector(name, count)


def _sum_bias(source: Source, path: str) -> Tensor | None:
    """The bias of the sum of experts; llama.cpp's converter leaves it out."""
    if source.checkpoint.format == "gguf":
        return None
    return source.vector(f"{path}.bias", source.config.hidden_size)


class ExpertArrival(NamedTuple):
    """The weights and biases of an expert that takes a ``place`` among those of this rank, in the
    order of :attr:`ExpertMLP.projections`."""

    place: int
    parts: tuple[tuple[Weight, Tensor | None], ...]


class ExpertMLP:
    """``shared``: the MLP of the shared experts; its results are summed over ranks with those of
    the others, unless ranks have whole experts or these are latent. ``share``: the experts of this
    rank, if it has whole ones. ``limit``: see :class:`sdk.models.mlp.MLP`."""

    def __init__(
        self,
        source: Source,
        path: str,
        rules: LayerRules,
        shared: Callable[[Rows], Tensor] | None = None,
        *,
        limit: float | None = None,
    ) -> None:
        c = source.config
        assert c.experts is not None
        self.ops, self.limit = source.ops, limit
        self.mesh = source.mesh
        self.spec = c.experts
        self.activation = c.activation
        self.path = f"{path}.experts"
        router = f"{path}.{rules.router}"
        self.router = source.matrix(router, self.spec.count, c.hidden_size)
        self.bias = _route_bias(source, router, self.spec.count) if rules.route_bias else None
        #: The factor of each expert, where it has one.
        self.factors: Tensor | None = None
        #: Whether the router reads what enters the layer, and not what experts read.
        self.early = rules.route_early
        #: One, if the score of a token's expert multiplies what that reads.
        self.one: Tensor | None = None
        if rules.route_inputs:
            self.one = torch.ones(1, device=self.ops.device)
        if self.spec.beside:
            self.factors = source.vector(f"{router}.per_expert_scale", self.spec.count)
        self.shared, self.shared_gate = shared, None
        if shared is not None and rules.shared_gate:
            self.shared_gate = source.matrix(f"{path}.shared_expert_gate", 1, c.hidden_size)
        self.share = source.expert_share(path)
        experts, cut = list(range(self.spec.count)), (0, self.spec.width)
        if self.share is not None:
            experts = self.share.weights
        else:
            cut = self.mesh.columns(self.spec.width)
        self.names = _GATE_UP if rules.gated else _UP
        #: The projection to the gate, where that is clamped: it is not in ``up`` then.
        self.gate: ExpertProjection | None = None
        self.gate_limit = limit
        if limit is not None:
            if rules.limits_first:  # of SiLU, which grows where it is positive
                self.gate_limit = limit / (1 + math.exp(-limit))
            self.names = _UP
            self.gate = source.expert_columns(self.path, _GATE, experts, *cut)
        self.up = source.expert_columns(self.path, self.names, experts, *cut)
        self.down = source.expert_rows(self.path, "down_proj", experts, *cut)
        self.sum_bias = _sum_bias(source, self.path) if rules.experts_bias else None
        #: The projections to the features that experts read, and back.
        self.latent: tuple[Projection, Projection] | None = None
        if (latent := self.spec.inputs) is not None:
            self.latent = (
                source.matrix(f"{path}.latent_in", latent, c.hidden_size),
                source.matrix(f"{path}.latent_out", c.hidden_size, latent),
            )

    #: The router needs floats.
    rounding = None

    def __call__(
        self, x: Rows, routed: Tensor | None = None, logits: Tensor | None = None
    ) -> Tensor:
        """``[T, hidden] -> [T, hidden]``, float32. ``routed``: what the router reads, if not x.
        ``logits``: its result ``[T, experts]``, if it has run before."""
        assert not isinstance(x, tuple)
        spec, share = self.spec, self.share
        shared = None if self.shared is None else self.shared(x)
        gate = None if self.shared_gate is None else self.shared_gate(x)
        if logits is None:
            logits = self.router(x if routed is None else routed)
        if self.latent is not None:
            x = self.latent[0](x)
        if share is not None and (tokens := share.routing.tokens) is not None:
            logits, x = self.ops.moe.gather(logits, tokens), self.ops.moe.gather(x, tokens)
        routes = self.ops.moe.route(
            logits,
            spec.per_token,
            spec.route,
            bias=self.bias,
            experts=None if share is None else share.routing,
            factors=self.factors,
        )
        if self.one is not None:
            x = self.ops.gate(x, routes.weights, "linear")
            ones = self.ops.add_bias(self.ops.zeros(*routes.weights.shape), self.one)
            routes = replace(routes, weights=ones)
        if self.gate is not None and self.limit is not None and self.gate_limit is not None:
            turned = self.ops.activation(self.gate(x, routes), self.activation, routes.used)
            turned = self.ops.clamp(turned, self.gate_limit)
            hidden = self.ops.clamp(self.up(x, routes), self.limit)
            hidden = self.ops.gate(hidden, turned, "linear")
        elif len(self.names) == 2:
            hidden = self.up.gated(x, routes, self.activation)
        else:
            hidden = self.ops.activation(self.up(x, routes), self.activation, routes.used)
        beside = (shared, gate) if self.latent is None else (None, None)
        y = self.ops.moe.combine(self.down(hidden, routes), routes, *beside)
        y = self.ops.scale(y, spec.scale)
        if share is None and self.mesh.group is not None:
            y = self.ops.all_reduce(y, self.mesh.group)
        if self.latent is not None:
            y = self.latent[1](y)
            y = y if shared is None else self.ops.add(y, shared)
        return y if self.sum_bias is None else self.ops.add_bias(y, self.sum_bias)

    @property
    def reads_ahead(self) -> bool:
        """Whether :meth:`expect` has an effect: some experts are in a file."""
        grouped = self.up.weight.grouped
        plain = self.latent is None and self.one is None and self.share is None and not self.early
        return plain and grouped is not None and grouped.reads_ahead

    def expect(self, x: Tensor) -> None:
        """Have experts read that rows like ``x [T, hidden]`` will need: the router's choice of what
        it will read some operators later, approximately."""
        grouped = self.up.weight.grouped
        assert grouped is not None
        logits = self.router(x)
        self.ops.moe.expect(grouped, logits, self.spec.per_token, self.spec.route, bias=self.bias)

    @property
    def projections(self) -> tuple[ExpertProjection, ...]:
        """Those of the experts."""
        return (self.up, self.down) if self.gate is None else (self.up, self.down, self.gate)

    def load(self, source: Source, placement: Placement) -> list[ExpertArrival]:
        """Load the experts that another placement gives this rank.

        :raises CheckpointError: only some experts have a bias.
        """
        assert self.share is not None
        arrivals, width = [], self.spec.width
        for place, expert in self.share.arrivals(placement):
            parts = [
                source.expert_column(self.path, self.names, expert, 0, width),
                source.expert_row(self.path, "down_proj", expert, 0, width),
            ]
            if self.gate is not None:
                parts.append(source.expert_column(self.path, _GATE, expert, 0, width))
            for own, (_, bias) in zip(self.projections, parts, strict=True):
                if (bias is None) != (own.bias is None):
                    raise CheckpointError(f"{self.path}: expected a bias for every expert or none")
            arrivals.append(ExpertArrival(place, tuple(parts)))
        return arrivals

    def move(self, arrivals: Sequence[ExpertArrival], placement: Placement) -> None:
        """Exchange experts for those that :meth:`load` has loaded, and route by ``placement``.

        Recorded steps have the addresses of the weights that leave: they must not run any more.
        """
        assert self.share is not None
        for arrival in arrivals:
            for own, part in zip(self.projections, arrival.parts, strict=True):
                own.replace(arrival.place, *part)
        self.share.move(placement)
