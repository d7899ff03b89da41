"""The mixer of Mamba-2: a convolution, a state space of scalar decays, and a gated norm.

``z, x, b, c, dt`` are one projection; x, b and c go through a convolution, and the state of each
head follows :meth:`sdk.kernels.operators.state_ops.StateOps.ssd`. Dao and Gu, "Transformers are
SSMs" (2024), arXiv 2405.21060; transformers' modeling_mamba2.py, modeling_bamba.py,
modeling_falcon_h1.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from sdk.models.mixers.mixer import conv_rows, decay_rates, rows_of, share_of
from sdk.quant.caches import StateCache, StatePart

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.operators.norm import Norm
    from sdk.kernels.operators.rounding import Rounding, Rows
    from sdk.kernels.operators.states import LayerState
    from sdk.models.mixers.attention import Step
    from sdk.models.projections import Projection
    from sdk.models.source import Source


class Factors(NamedTuple):
    """What the parts of Mamba-2's projection and its output are multiplied with (Falcon-H1)."""

    z: float = 1.0
    x: float = 1.0
    b: float = 1.0
    c: float = 1.0
    dt: float = 1.0
    out: float = 1.0


class Mamba2Spec(NamedTuple):
    """``heads`` of ``head_dim`` features, each with ``state`` numbers per feature, whose b and c
    belong to one of ``groups``; a convolution over ``taps`` tokens.

    ``conv_bias``, ``bias``: of the convolution, of both projections. ``least``, ``most``: limits of
    time steps. ``norm``: results have a norm over each group's features, before the gate
    (``norm_first``) or after it; without it there is the gate alone.
    """

    heads: int
    head_dim: int
    groups: int
    state: int
    taps: int
    conv_bias: bool = True
    in_bias: bool = False
    out_bias: bool = False
    least: float = 0.0
    most: float = math.inf
    norm: bool = True
    norm_first: bool = False
    factors: Factors = Factors()
    name: str = "mamba"

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.heads * self.head_dim

    @property
    def step_width(self) -> int:
        """See :class:`~sdk.models.configs.recurrent.RecurrentSpec`: the projection with a gate for
        each feature, the convolution, results, results with norm and gate; time steps."""
        return 5 * self.inner + 4 * self.groups * self.state + 2 * self.heads

    def cache(self, ranks: int = 1) -> StateCache:
        """See :class:`sdk.models.configs.recurrent.RecurrentSpec`."""
        groups = share_of("groups of Mamba-2", self.groups, ranks)
        heads = share_of("heads of Mamba-2", self.heads, ranks)
        channels = heads * self.head_dim + 2 * groups * self.state
        return StateCache(
            (
                StatePart("conv", (self.taps - 1, channels)),
                StatePart("ssm", (heads, self.head_dim, self.state)),
            )
        )

    def mixer(self, source: Source, path: str, *, reduce: bool) -> Mamba2:
        """See :class:`sdk.models.configs.recurrent.RecurrentSpec`."""
        return Mamba2(source, path, self, reduce=reduce)


class Mamba2:
    """The mixer of one layer: see the module."""

    def __init__(self, source: Source, path: str, spec: Mamba2Spec, *, reduce: bool) -> None:
        self.ops, self.spec = source.ops, spec
        mesh = source.mesh
        self.groups = share_of("groups of Mamba-2", spec.groups, mesh.size)
        self.heads = share_of("heads of Mamba-2", spec.heads, mesh.size)
        self.width, self.shared = self.heads * spec.head_dim, self.groups * spec.state
        inner, shared = spec.inner, spec.groups * spec.state
        #: Of the features of x, b and c, one after the other: this rank's of each.
        starts = (0, inner, inner + shared)
        counts = (self.width, self.shared, self.shared)
        ranges = [(at + mesh.rank * n, n) for at, n in zip(starts, counts, strict=True)]
        total = 2 * inner + 2 * shared + spec.heads
        rows = [(mesh.rank * self.width, self.width)]
        rows += [(inner + at, n) for at, n in ranges]
        rows.append((total - spec.heads + mesh.rank * self.heads, self.heads))
        #: The projections to z and dt, where these are multiplied: then they are not in ``into``.
        self.apart: tuple[Projection, Projection] | None = None
        if (spec.factors.z, spec.factors.dt) != (1.0, 1.0):
            z, dt = _projection(source, path, "in_proj_z", total, rows[:1], spec), rows[-1:]
            self.apart = z, _projection(source, path, "in_proj_dt", total, dt, spec)
            rows_into = rows[1:-1]
        else:
            rows_into = rows if mesh.size > 1 else [(0, total)]
        self.into = _projection(source, path, "in_proj", total, rows_into, spec)
        self.conv, self.conv_bias = conv_rows(
            source,
            path,
            ["conv1d"],
            inner + 2 * shared,
            spec.taps,
            ranges,
            bias=spec.conv_bias,
        )
        self._multiply_inputs(counts)
        heads = [(mesh.rank * self.heads, self.heads)]
        self.rates = rows_of(decay_rates(source, path, spec.heads), heads)
        self.dt_bias = rows_of(source.vector(f"{path}.dt_bias", spec.heads), heads)
        limits = (spec.least, spec.most)
        self.limits = None if limits == (0.0, math.inf) else limits
        self.skip = rows_of(source.vector(f"{path}.D", spec.heads), heads)
        self.norm: Norm | None = None
        if spec.norm:
            weight = rows_of(source.vector(f"{path}.norm.weight", inner), rows[:1])
            from sdk.kernels.operators.norm import Norm

            self.norm = Norm(weight.view(self.groups, -1), source.config.norm_eps)
        self.out = source.row(
            f"{path}.out_proj", inner, *rows[0], bias=spec.out_bias, reduce=reduce
        )

    def _multiply_inputs(self, counts: tuple[int, int, int]) -> None:
        """Put the factors of x, b and c into the convolution: what is before it has none."""
        f = self.spec.factors
        start = 0
        for count, factor in zip(counts, (f.x, f.b, f.c), strict=True):
            if factor != 1.0:
                self.conv[start : start + count] = self.conv[start : start + count] * factor
            start += count

    @property
    def rounding(self) -> Rounding | None:
        """See :class:`sdk.models.projections.Projection`."""
        return self.into.rounding

    def __call__(self, x: Rows, step: Step, cache: LayerState) -> Tensor:
        spec, states = self.spec, self.ops.states
        z, xbc, dt = self._parts(x)
        xbc = states.causal_conv(
            xbc, self.conv, self.conv_bias, cache["conv"], step.batch, activation="silu"
        )
        tokens = len(xbc)
        inner, b, c = xbc.split_with_sizes([self.width, self.shared, self.shared], dim=1)
        y = states.ssd(
            inner.view(tokens, self.heads, spec.head_dim),
            states.rates(dt, "softplus", bias=self.dt_bias, limits=self.limits),
            self.rates,
            b.view(tokens, self.groups, spec.state),
            c.view(tokens, self.groups, spec.state),
            self.skip,
            cache["ssm"],
            step.batch,
        )
        y = self._gate(y.view(tokens, self.width), z)
        return self.ops.scale(self.out(y), spec.factors.out)

    def _parts(self, x: Rows) -> tuple[Tensor, Tensor, Tensor]:
        """z, what goes into the convolution, and dt."""
        if self.apart is not None:
            f = self.spec.factors
            z, dt = (one(x) for one in self.apart)
            return self.ops.scale(z, f.z), self.into(x), self.ops.scale(dt, f.dt)
        sizes = [self.width, self.width + 2 * self.shared, self.heads]
        z, xbc, dt = self.into(x).split_with_sizes(sizes, dim=1)
        return z, xbc, dt

    def _gate(self, y: Tensor, z: Tensor) -> Tensor:
        """``[T, features]`` with its gate and its norm."""
        if self.norm is None:
            return self.ops.gate(y, z, "silu")
        tokens, groups, first = len(y), self.groups, not self.spec.norm_first
        parts = y.view(tokens, groups, -1), z.view(tokens, groups, -1)
        return self.ops.states.gated_norm(*parts, self.norm, first=first).view(tokens, self.width)


def _projection(
    source: Source,
    path: str,
    name: str,
    total: int,
    rows: Sequence[tuple[int, int]],
    spec: Mamba2Spec,
) -> Projection:
    """The projection to ``rows`` of ``in_proj``, which has ``total``."""
    parts = [("in_proj", total, *own) for own in rows]
    return source.columns(path, name, parts, bias=spec.in_bias)
