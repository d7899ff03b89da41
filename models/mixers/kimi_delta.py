"""Kimi delta attention (KDA), whose state forgets at a rate of its own in each row.

``q, k, v = conv([q | k | v] x)``, the decay of a row of a head's state is ``-e^A softplus(f x +
b)`` with f of low rank, the state follows the gated delta rule
(:meth:`sdk.kernels.operators.state_ops.StateOps.gated_delta`), and the result of a head is
``norm(y) * sigmoid(g x)`` with g of low rank. Kimi Team, "Kimi Linear" (2025), arXiv 2510.26692;
transformers' modeling_kimi_linear.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sdk.models.mixers.mixer import conv_rows, decay_rates, range_of, share_of
from sdk.quant.caches import StateCache, StatePart

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.operators.rounding import Rounding, Rows
    from sdk.kernels.operators.states import LayerState
    from sdk.models.mixers.attention import Step
    from sdk.models.projections import Projection
    from sdk.models.source import Source

#: What is divided over ranks.
_HEADS = "heads of Kimi delta attention"
#: Of the norms of q and k.
_L2_EPS = 1e-6


class KimiDeltaSpec(NamedTuple):
    """``heads`` of ``dim`` features of queries, keys and values, and convolutions over ``taps``
    tokens. The projections of low rank have ``dim`` features."""

    heads: int
    dim: int
    taps: int
    name: str = "self_attn"

    @property
    def step_width(self) -> int:
        """See :class:`~sdk.models.configs.recurrent.RecurrentSpec`: q, k and v before and after the
        convolution, decays and what they come from, gates, results with and without them;
        strengths and what is of low rank."""
        return 11 * self.heads * self.dim + 4 * self.heads + 2 * self.dim

    def cache(self, ranks: int = 1) -> StateCache:
        """See :class:`sdk.models.configs.recurrent.RecurrentSpec`."""
        heads = share_of(_HEADS, self.heads, ranks)
        conv = StatePart("conv", (self.taps - 1, 3 * heads * self.dim))
        return StateCache((conv, StatePart("delta", (heads, self.dim, self.dim))))

    def mixer(self, source: Source, path: str, *, reduce: bool) -> KimiDelta:
        """See :class:`sdk.models.configs.recurrent.RecurrentSpec`."""
        return KimiDelta(source, path, self, reduce=reduce)


class KimiDelta:
    """The mixer of one layer: see the module."""

    def __init__(self, source: Source, path: str, spec: KimiDeltaSpec, *, reduce: bool) -> None:
        from sdk.kernels.lazy_torch import torch
        from sdk.kernels.operators.norm import Norm

        self.ops, self.spec = source.ops, spec
        start, self.heads = range_of(_HEADS, spec.heads, source.mesh)
        total, own = spec.heads * spec.dim, (start * spec.dim, self.heads * spec.dim)
        self.width = own[1]
        self.into = source.columns(
            path, "qkv_proj", [(f"{name}_proj", total, *own) for name in "qkv"]
        )
        # what makes rates, and the gate's few features
        few = [("b_proj", spec.heads, start, self.heads)]
        few += [(f"{name}_a_proj", spec.dim, 0, spec.dim) for name in "fg"]
        self.few = source.columns(path, "bfg_proj", few, accurate=True)

        def wide(name: str) -> Projection:
            parts = [(name, total, *own)]
            return source.columns(path, name, parts, accurate=True, inputs=spec.dim)

        self.decays, self.gates = wide("f_b_proj"), wide("g_b_proj")
        names = [f"{name}_conv1d" for name in "qkv"]
        each = [conv_rows(source, path, [name], total, spec.taps, [own])[0] for name in names]
        self.conv = torch.cat(each)
        heads = slice(start, start + self.heads)
        rates = decay_rates(source, path, spec.heads, stored=(1, 1, spec.heads, 1))
        self.rates = rates[heads].contiguous()
        rows = slice(own[0], sum(own))
        self.dt_bias = source.vector(f"{path}.dt_bias", total)[rows].contiguous()
        weight = source.vector(f"{path}.o_norm.weight", spec.dim)
        self.norm = Norm(weight, source.config.norm_eps)
        self.out = source.row(f"{path}.o_proj", total, *own, reduce=reduce)

    @property
    def rounding(self) -> Rounding | None:
        """See :class:`sdk.models.projections.Projection`."""
        found = self.into.rounding
        return found if self.few.rounding == found else None

    def __call__(self, x: Rows, step: Step, cache: LayerState) -> Tensor:
        spec, states = self.spec, self.ops.states
        qkv = states.causal_conv(
            self.into(x), self.conv, None, cache["conv"], step.batch, activation="silu"
        )
        b, f, g = self.few(x).split_with_sizes([self.heads, spec.dim, spec.dim], dim=1)
        shape = (len(qkv), self.heads, spec.dim)
        q, k, v = (part.view(shape) for part in qkv.split_with_sizes([self.width] * 3, dim=1))
        decay = states.rates(self.decays(f), "softplus", bias=self.dt_bias, factor=self.rates)
        y = states.gated_delta(
            q,
            k,
            v,
            decay.view(shape),
            states.rates(b, "sigmoid"),
            cache["delta"],
            step.batch,
            spec.dim**-0.5,
            eps=_L2_EPS,
        )
        y = states.gated_norm(y, self.gates(g).view(shape), self.norm, "sigmoid")
        return self.out(y.view(len(qkv), self.width))
