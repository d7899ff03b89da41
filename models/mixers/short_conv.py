"""The gated short convolution of LFM2: ``out(C * conv(B * x))`` with B, C and x of one projection.

Liquid AI, "LFM2 Technical Report" (2025), arXiv 2511.23404; transformers' modeling_lfm2.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from sdk.models.mixers.mixer import conv_rows, range_of, share_of
from sdk.quant.caches import StateCache, StatePart

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.operators.rounding import Rounding, Rows
    from sdk.kernels.operators.states import LayerState
    from sdk.models.mixers.attention import Step
    from sdk.models.source import Source


class ShortConvSpec(NamedTuple):
    """``channels`` of a convolution over ``taps`` tokens, the last one included. ``bias``: of the
    convolution and of both projections."""

    channels: int
    taps: int
    bias: bool = False
    name: str = "conv"

    @property
    def step_width(self) -> int:
        """See :class:`~sdk.models.configs.recurrent.RecurrentSpec`; results lie where others of the
        hidden size have been."""
        return 3 * self.channels

    def cache(self, ranks: int = 1) -> StateCache:
        """See :class:`sdk.models.configs.recurrent.RecurrentSpec`."""
        own = share_of("channels of short convolutions", self.channels, ranks)
        return StateCache((StatePart("conv", (self.taps - 1, own)),))

    def mixer(self, source: Source, path: str, *, reduce: bool) -> ShortConv:
        """See :class:`sdk.models.configs.recurrent.RecurrentSpec`."""
        return ShortConv(source, path, self, reduce=reduce)


class ShortConv:
    """The mixer of one layer: see the module."""

    def __init__(self, source: Source, path: str, spec: ShortConvSpec, *, reduce: bool) -> None:
        self.ops = source.ops
        width = spec.channels
        start, self.width = range_of("channels of short convolutions", width, source.mesh)
        rows = [(0, 3 * width)]
        if self.width < width:
            rows = [(i * width + start, self.width) for i in range(3)]
        parts = [("in_proj", 3 * width, *own) for own in rows]
        self.into = source.columns(path, "in_proj", parts, bias=spec.bias)
        self.weight, self.bias = conv_rows(
            source, path, ["conv"], width, spec.taps, [(start, self.width)], bias=spec.bias
        )
        self.out = source.row(
            f"{path}.out_proj", width, start, self.width, bias=spec.bias, reduce=reduce
        )

    @property
    def rounding(self) -> Rounding | None:
        """See :class:`sdk.models.projections.Projection`."""
        return self.into.rounding

    def __call__(self, x: Rows, step: Step, cache: LayerState) -> Tensor:
        before, after, inner = self.into(x).split_with_sizes([self.width] * 3, dim=1)
        y = self.ops.states.causal_conv(
            inner, self.weight, self.bias, cache["conv"], step.batch, before=before, after=after
        )
        return self.out(y)
