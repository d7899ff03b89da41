"""The sizes of residual streams: see :mod:`sdk.models.altup`."""

from __future__ import annotations

from sdk.kernels.dataclass import dataclass


@dataclass(frozen=True, slots=True)
class StreamSpec:
    """``count``: of streams, of which layers run on the first. ``rank``: features between the
    matrices beside attention. ``scaled``: the first stream is multiplied by a vector before the
    embedding for a layer. ``deviations``: of each layer's MLP the limit of its gate, in standard
    deviations above the mean; ``None``: it has none."""

    count: int
    rank: int
    scaled: bool
    deviations: tuple[float | None, ...]
