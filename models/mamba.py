"""The mixer of Mamba-1: a convolution, and a state space whose decays differ from number to number.

``x, z`` are one projection; x goes through a convolution, then dt, b and c are projected from it,
and the state of each channel follows :meth:`sdk.kernels.state_ops.StateOps.selective_scan`. Gu and
Dao, "Mamba" (2023), arXiv 2312.00752; transformers' modeling_mamba.py, modeling_falcon_mamba.py,
modeling_jamba.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from sdk.models.mixer import conv_rows, decay_rates, range_of, rows_of, share_of
from sdk.quant.caches import StateCache, StatePart

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.norm import Norm
    from sdk.kernels.rounding import Rounding, Rows
    from sdk.kernels.states import LayerState
    from sdk.models.attention import Step
    from sdk.models.source import Source

#: What is divided over ranks.
_CHANNELS = "channels of Mamba-1"


class MambaSpec(NamedTuple):
    """``inner`` channels, each with ``state`` numbers; a convolution over ``taps`` tokens; dt comes
    from ``rank`` features.

    ``conv_bias``, ``bias``: of the convolution, of the projections in and out. ``norms``: dt's
    features, b and c have RMSNorms with a weight, or without one (``plain``), whose eps is ``eps``
    if it is not the model's.
    """

    inner: int
    state: int
    taps: int
    rank: int
    conv_bias: bool = True
    bias: bool = False
    norms: Literal["weighted", "plain"] | None = None
    eps: float | None = None
    name: str = "mamba"

    @property
    def step_width(self) -> int:
        """See :class:`~sdk.models.recurrent.RecurrentSpec`: the projection, the convolution, dt
        twice and results; what dt, b and c come from, and their norms."""
        return 6 * self.inner + (1 if self.norms is None else 2) * (self.rank + 2 * self.state)

    def cache(self, ranks: int = 1) -> StateCache:
        """See :class:`sdk.models.recurrent.RecurrentSpec`."""
        channels = share_of(_CHANNELS, self.inner, ranks)
        return StateCache(
            (
                StatePart("conv", (self.taps - 1, channels)),
                StatePart("ssm", (channels, self.state)),
            )
        )

    def mixer(self, source: Source, path: str, *, reduce: bool) -> Mamba:
        """See :class:`sdk.models.recurrent.RecurrentSpec`."""
        return Mamba(source, path, self, reduce=reduce)


class Mamba:
    """The mixer of one layer: see the module."""

    def __init__(self, source: Source, path: str, spec: MambaSpec, *, reduce: bool) -> None:
        self.ops, self.spec = source.ops, spec
        inner, rank, state = spec.inner, spec.rank, spec.state
        own = range_of(_CHANNELS, inner, source.mesh)
        start, self.width = own
        both = [("in_proj", 2 * inner, at, self.width) for at in (start, inner + start)]
        self.into = source.columns(path, "in_proj", both, bias=spec.bias)
        self.conv, self.conv_bias = conv_rows(
            source, path, ["conv1d"], inner, spec.taps, [own], bias=spec.conv_bias
        )
        # Two projections, because products need contiguous rows, and dt goes into another one.
        shape = (rank + 2 * state, inner)
        x_proj = f"{path}.x_proj"
        self.rates_in = source.summed_rows(x_proj, "x_proj_dt", shape, (0, rank), own)
        self.read = source.summed_rows(x_proj, "x_proj_bc", shape, (rank, 2 * state), own)
        dt = [("dt_proj", inner, *own)]
        self.rates = source.columns(path, "dt_proj", dt, bias=True, accurate=True, inputs=rank)
        self.norms: list[Norm] = []
        if spec.norms is not None:
            self._pull_norms(source, path)
        self.decays = rows_of(decay_rates(source, path, inner, state), [own])
        self.skip = rows_of(source.vector(f"{path}.D", inner), [own])
        self.out = source.row(f"{path}.out_proj", inner, *own, bias=spec.bias, reduce=reduce)

    def _pull_norms(self, source: Source, path: str) -> None:
        """Those of dt's features, of b and of c."""
        from sdk.kernels.norm import Norm

        eps = self.spec.eps or source.config.norm_eps
        sizes = {"dt": self.spec.rank, "b": self.spec.state, "c": self.spec.state}
        for name, size in sizes.items():
            weight = None
            if self.spec.norms == "weighted":
                weight = source.vector(f"{path}.{name}_layernorm.weight", size)
            self.norms.append(Norm(weight, eps))

    @property
    def rounding(self) -> Rounding | None:
        """See :class:`sdk.models.projections.Projection`."""
        return self.into.rounding

    def __call__(self, x: Rows, step: Step, cache: LayerState) -> Tensor:
        states = self.ops.states
        x, z = self.into(x).split_with_sizes([self.width, self.width], dim=1)
        x = states.causal_conv(
            x, self.conv, self.conv_bias, cache["conv"], step.batch, activation="silu"
        )
        dt = self.rates_in(x)
        b, c = self.read(x).split_with_sizes([self.spec.state] * 2, dim=1)
        if self.norms:
            dt, b, c = map(self.ops.norm, (dt, b, c), self.norms)
        dt = states.rates(self.rates(dt), "softplus")
        y = states.selective_scan(x, dt, self.decays, b, c, self.skip, cache["ssm"], step.batch)
        return self.out(self.ops.gate(y, z, "silu"))
