"""The gated delta net of Qwen 3-Next and 3.5 and of OLMo Hybrid.

``q, k, v = conv([q | k | v] x)``, each head's state follows the gated delta rule
(:meth:`sdk.kernels.operators.state_ops.StateOps.gated_delta`), and the result of a head is
``norm(y) * silu(z)``. Yang et al., "Gated Delta Networks" (2024), arXiv 2412.06464; transformers'
modeling_qwen3_next.py, modeling_qwen3_5.py, modeling_olmo_hybrid.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sdk.models.mixers.mixer import conv_rows, decay_rates, share_of
from sdk.quant.caches import StateCache, StatePart
from sdk.quant.errors import AlignmentError

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.operators.rounding import Rounding, Rows
    from sdk.kernels.operators.states import LayerState
    from sdk.models.mixers.attention import Step
    from sdk.models.source import Source

#: Of the norms of q and k, which all models have.
_L2_EPS = 1e-6


class _Heads(NamedTuple):
    """One rank's heads of keys and of values, as ranges ``(start, count)``."""

    keys: tuple[int, int]
    values: tuple[int, int]


class GatedDeltaSpec(NamedTuple):
    """``key_heads`` of ``key_dim`` and ``value_heads`` of ``value_dim`` features, and a convolution
    over ``taps`` tokens.

    Heads of values use the heads of keys in turn if they are ``tiled`` (GGUF files of Qwen 3.5),
    else neighbours use one. ``strength``: what the strength of an update is multiplied with; 2
    allows negative eigenvalues. ``norm_eps``: that of the norm of results; ``None``: the model's.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    tiled: bool = False
    strength: float = 1.0
    norm_eps: float | None = None
    name: str = "linear_attn"

    @property
    def step_width(self) -> int:
        """See :class:`~sdk.models.configs.recurrent.RecurrentSpec`: the projection with a gate for
        each value, the convolution, results, results with norm and gate; decays and strengths."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return 2 * (2 * keys + values) + 3 * values + 4 * self.value_heads

    def heads(self, rank: int, ranks: int) -> _Heads:
        """The heads of one rank.

        :raises AlignmentError: they cannot be divided.
        """
        repeats = self.value_heads // self.key_heads
        if not self.tiled or repeats == 1:
            own = share_of("key heads of delta nets", self.key_heads, ranks)
            return _Heads((rank * own, own), (rank * own * repeats, own * repeats))
        if repeats % ranks:  # each rank has all heads of keys
            raise AlignmentError(
                f"cannot split {self.value_heads} value heads of delta nets, in {repeats} turns, "
                f"over {ranks} ranks: expected a tensor parallel size that divides {repeats}, or "
                "the safetensors files of this model"
            )
        own = self.value_heads // ranks
        return _Heads((0, self.key_heads), (rank * own, own))

    def cache(self, ranks: int = 1) -> StateCache:
        """See :class:`sdk.models.configs.recurrent.RecurrentSpec`."""
        (_, keys), (_, values) = self.heads(0, ranks)
        channels = 2 * keys * self.key_dim + values * self.value_dim
        return StateCache(
            (
                StatePart("conv", (self.taps - 1, channels)),
                StatePart("delta", (values, self.key_dim, self.value_dim)),
            )
        )

    def mixer(self, source: Source, path: str, *, reduce: bool) -> GatedDeltaNet:
        """See :class:`sdk.models.configs.recurrent.RecurrentSpec`."""
        return GatedDeltaNet(source, path, self, reduce=reduce)


class GatedDeltaNet:
    """The mixer of one layer: see the module."""

    def __init__(self, source: Source, path: str, spec: GatedDeltaSpec, *, reduce: bool) -> None:
        self.ops, self.spec = source.ops, spec
        self.heads = spec.heads(source.mesh.rank, source.mesh.size)
        (k_start, self.keys), (v_start, self.values) = self.heads
        self.key_width, self.value_width = self.keys * spec.key_dim, self.values * spec.value_dim
        wide_k, wide_v = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
        of_keys = (k_start * spec.key_dim, self.key_width)
        of_values = (v_start * spec.value_dim, self.value_width)
        total = 2 * wide_k + wide_v
        #: Of the rows of q, k and v, one after the other.
        ranges = [(0, total)]
        if source.mesh.size > 1:
            ranges = [of_keys, (wide_k + of_keys[0], of_keys[1])]
            ranges.append((2 * wide_k + of_values[0], of_values[1]))
        parts = [("in_proj_qkv", total, *own) for own in ranges]
        apart = source.has(f"{path}.q_proj")
        if apart:
            parts = [(f"{name}_proj", wide_k, *of_keys) for name in "qk"]
            parts.append(("v_proj", wide_v, *of_values))
        parts.append(("in_proj_z", wide_v, *of_values))
        self.into = source.columns(path, "in_proj_qkvz", parts)
        heads = (spec.value_heads, v_start, self.values)
        each = [(name, *heads) for name in ("in_proj_b", "in_proj_a")]
        self.strengths = source.columns(path, "in_proj_ba", each, accurate=True)
        names = ["conv1d"]
        if source.has(f"{path}.q_conv1d.weight"):
            names = [f"{part}_conv1d" for part in "qkv"]
        self.conv, _ = conv_rows(source, path, names, total, spec.taps, ranges)
        own = slice(v_start, v_start + self.values)
        self.rates = decay_rates(source, path, spec.value_heads)[own].contiguous()
        self.dt_bias = source.vector(f"{path}.dt_bias", spec.value_heads)[own].contiguous()
        #: What strengths of updates are multiplied with.
        self.strength: Tensor | None = None
        if spec.strength != 1.0:
            from sdk.kernels.lazy_torch import torch

            self.strength = torch.full((1,), spec.strength).to(self.ops.device)
        weight = source.vector(f"{path}.norm.weight", spec.value_dim)
        from sdk.kernels.operators.norm import Norm

        self.norm = Norm(weight, spec.norm_eps or source.config.norm_eps)
        self.out = source.row(f"{path}.out_proj", wide_v, *of_values, reduce=reduce)

    @property
    def rounding(self) -> Rounding | None:
        """See :class:`sdk.models.projections.Projection`."""
        found = self.into.rounding
        return found if self.strengths.rounding == found else None

    def __call__(self, x: Rows, step: Step, cache: LayerState) -> Tensor:
        spec, states = self.spec, self.ops.states
        qkvz = self.into(x)
        b, a = self.strengths(x).split_with_sizes([self.values] * 2, dim=1)
        width = 2 * self.key_width + self.value_width
        qkv = states.causal_conv(
            qkvz[:, :width], self.conv, None, cache["conv"], step.batch, activation="silu"
        )
        tokens = len(qkv)
        q, k, v = qkv.split_with_sizes([self.key_width, self.key_width, self.value_width], dim=1)
        y = states.gated_delta(
            q.view(tokens, self.keys, spec.key_dim),
            k.view(tokens, self.keys, spec.key_dim),
            v.view(tokens, self.values, spec.value_dim),
            states.rates(a, "softplus", bias=self.dt_bias, factor=self.rates),
            states.rates(b, "sigmoid", factor=self.strength),
            cache["delta"],
            step.batch,
            spec.key_dim**-0.5,
            eps=_L2_EPS,
            tiled=spec.tiled,
        )
        z = qkvz[:, width:].view(tokens, self.values, spec.value_dim)
        return self.out(states.gated_norm(y, z, self.norm).view(tokens, self.value_width))
