"""The mixer of Mamba-1: a convolution, and a state space whose decays differ from number to number.

``x, z`` are one projection; x goes through a convolution, then dt, b and c are projected from it,
and the state of each channel follows
:meth:`sdk.kernels.operators.state_ops.StateOps.selective_scan`. Gu and Dao, "Mamba" (2023), arXiv
2312.00752; transformers' modeling_mamba.py, modeling_falcon_mamba.py, modeling_jamba.py. PLaMo 2
has heads: the channels of one have the same dt and one decay, as in Mamba-2
(:meth:`sdk.kernels.operators.state_ops.StateOps.ssd`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

from sdk.models.mixers.mixer import conv_rows, decay_rates, range_of, rows_of, share_of
from sdk.quant.caches import StateCache, StatePart

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.operators.norm import Norm
    from sdk.kernels.operators.rounding import Rounding, Rows
    from sdk.kernels.operators.states import LayerState
    from sdk.models.mixers.attention import Step
    from sdk.models.projections import Projection
    from sdk.models.source import Source

#: What is divided over ranks.
_CHANNELS = "channels of Mamba-1"
_HEADS = "heads of PLaMo 2's Mamba"


class MambaSpec(NamedTuple):
    """``inner`` channels, each with ``state`` numbers; a convolution over ``taps`` tokens; dt comes
    from ``rank`` features.

    ``conv_bias``, ``bias``: of the convolution, of the projections in and out. ``norms``: dt's
    features, b and c have RMSNorms with a weight, or without one (``plain``), whose eps is ``eps``
    if it is not the model's. ``heads``: see the module; the rows of the first projection are then
    those of z and of x of one head after the other, and those of the second one b, c, dt.
    """

    inner: int
    state: int
    taps: int
    rank: int
    conv_bias: bool = True
    bias: bool = False
    norms: Literal["weighted", "plain"] | None = None
    eps: float | None = None
    heads: int | None = None
    name: str = "mamba"

    @property
    def step_width(self) -> int:
        """See :class:`~sdk.models.configs.recurrent.RecurrentSpec`: the projection, the
        convolution, dt twice and results; what dt, b and c come from, and their norms."""
        return 6 * self.inner + (1 if self.norms is None else 2) * (self.rank + 2 * self.state)

    def cache(self, ranks: int = 1) -> StateCache:
        """See :class:`sdk.models.configs.recurrent.RecurrentSpec`."""
        if self.heads is None:
            channels = share_of(_CHANNELS, self.inner, ranks)
            own: tuple[int, ...] = (channels, self.state)
        else:
            heads = share_of(_HEADS, self.heads, ranks)
            channels = heads * (self.inner // self.heads)
            own = (heads, channels // heads, self.state)
        conv = StatePart("conv", (self.taps - 1, channels))
        return StateCache((conv, StatePart("ssm", own)))

    def mixer(self, source: Source, path: str, *, reduce: bool) -> Mamba:
        """See :class:`sdk.models.configs.recurrent.RecurrentSpec`."""
        return Mamba(source, path, self, reduce=reduce)


class Mamba:
    """The mixer of one layer: see the module."""

    def __init__(self, source: Source, path: str, spec: MambaSpec, *, reduce: bool) -> None:
        self.ops, self.spec = source.ops, spec
        inner, rank, state = spec.inner, spec.rank, spec.state
        # This rank's channels, and its heads, or channels, each of which has one dt.
        if spec.heads is None:
            own = steps = range_of(_CHANNELS, inner, source.mesh)
        else:
            steps = range_of(_HEADS, spec.heads, source.mesh)
            own = (steps[0] * (inner // spec.heads), steps[1] * (inner // spec.heads))
        self.width = own[1]
        self.into = self._pull_input(source, path, own, steps[1])
        self.conv, self.conv_bias = conv_rows(
            source, path, ["conv1d"], inner, spec.taps, [own], bias=spec.conv_bias
        )
        # Two projections, because products need contiguous rows, and dt goes into another one.
        shape = (rank + 2 * state, inner)
        x_proj = f"{path}.x_proj"
        of_dt, of_read = (0, rank), (rank, 2 * state)
        if spec.heads is not None:
            of_dt, of_read = (2 * state, rank), (0, 2 * state)
        self.rates_in = source.summed_rows(x_proj, "x_proj_dt", shape, of_dt, own)
        self.read = source.summed_rows(x_proj, "x_proj_bc", shape, of_read, own)
        dt = [("dt_proj", spec.heads or inner, *steps)]
        self.rates = source.columns(path, "dt_proj", dt, bias=True, accurate=True, inputs=rank)
        self.norms: list[Norm] = []
        if spec.norms is not None:
            self._pull_norms(source, path)
        sizes = (inner, state) if spec.heads is None else (spec.heads,)
        self.decays = rows_of(decay_rates(source, path, *sizes), [steps])
        self.skip = rows_of(source.vector(f"{path}.D", sizes[0]), [steps])
        self.out = source.row(f"{path}.out_proj", inner, *own, bias=spec.bias, reduce=reduce)

    def _pull_input(
        self, source: Source, path: str, own: tuple[int, int], heads: int
    ) -> Projection:
        """The projection to x and z. ``own``: this rank's channels."""
        inner, (start, width), bias = self.spec.inner, own, self.spec.bias
        if self.spec.heads is None:
            both = [("in_proj", 2 * inner, at, width) for at in (start, inner + start)]
            return source.columns(path, "in_proj", both, bias=bias)
        from sdk.kernels.lazy_torch import torch

        of_heads = torch.arange(2 * width).view(heads, 2, width // heads).transpose(0, 1)
        order = of_heads.flip(0).reshape(-1)  # x before z
        parts = [("in_proj", 2 * inner, 2 * start, 2 * width)]
        return source.columns(path, "in_proj", parts, bias=bias, order=order)

    def _pull_norms(self, source: Source, path: str) -> None:
        """Those of dt's features, of b and of c."""
        from sdk.kernels.operators.norm import Norm

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
        given = (self.skip, cache["ssm"], step.batch)
        if self.spec.heads is None:
            y = states.selective_scan(x, dt, self.decays, b, c, *given)
        else:
            x = x.view(len(x), dt.shape[1], -1)
            y = states.ssd(x, dt, self.decays, b.unsqueeze(1), c.unsqueeze(1), *given)
            y = y.view(len(y), self.width)
        return self.out(self.ops.gate(y, z, "silu"))
