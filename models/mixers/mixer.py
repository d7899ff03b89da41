"""What mixes the tokens of a layer: attention, or a recurrent mixer with a state of one size.

A recurrent mixer has two sides. Its sizes, a :class:`~sdk.models.configs.recurrent.RecurrentSpec`,
are read from a config and say what it keeps of the tokens before. From these
:class:`~sdk.models.decoder.Layer` builds the mixer itself. Each kind is one module:
:mod:`sdk.models.mixers.short_conv`, :mod:`sdk.models.mixers.gated_delta_net`,
:mod:`sdk.models.mixers.mamba`, :mod:`sdk.models.mixers.mamba2`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from sdk.quant.errors import AlignmentError, CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.kernels.operators.rounding import Rounding, Rows
    from sdk.models.mixers.attention import Step
    from sdk.models.parallel import Mesh
    from sdk.models.source import Source


class Mixer(Protocol):
    """A block that reads other tokens than its own, through what a cache keeps of them."""

    @property
    def rounding(self) -> Rounding | None:
        """See :class:`sdk.models.projections.Projection`."""

    def __call__(self, x: Rows, step: Step, cache: Any, /) -> Tensor:
        """``[T, hidden] -> [T, hidden]``. ``cache``: the memory of its layer, of the kind that the
        mixer says (KVPages, LayerState)."""


def share_of(what: str, count: int, ranks: int) -> int:
    """How many of ``count`` each rank has.

    :raises AlignmentError: they cannot be divided.
    """
    if count % ranks:
        raise AlignmentError(
            f"cannot split {count} {what} over {ranks} ranks: expected a tensor parallel size that "
            f"divides {count}"
        )
    return count // ranks


def range_of(what: str, count: int, mesh: Mesh) -> tuple[int, int]:
    """This rank's range ``(start, count)`` of ``count``: see :func:`share_of`."""
    own = share_of(what, count, mesh.size)
    return mesh.rank * own, own


def conv_rows(
    source: Source,
    path: str,
    names: Sequence[str],
    channels: int,
    taps: int,
    ranges: Sequence[tuple[int, int]],
    *,
    bias: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """This rank's channels of depthwise convolutions: the weight float32 ``[C, taps]`` and its
    bias ``[C]``.

    ``names``: the convolutions one after the other, ``channels`` together: transformers divides
    joined ones equally when it saves them, whatever they were before. ``ranges``: of all channels,
    each ``(start, count)``. ``bias``: of one convolution; GGUF files have no key for it.

    :raises CheckpointError: there are other channels.
    """
    size = channels if len(names) == 1 else None
    from sdk.kernels.lazy_torch import torch

    weight = torch.cat([source.vector(f"{path}.{name}.weight", size, 1, taps) for name in names])
    if len(weight) != channels:
        raise CheckpointError(
            f"{path}: {', '.join(names)}: expected {channels} channels, found {len(weight)}"
        )
    own = rows_of(weight.view(channels, taps), ranges)
    where = f"{path}.{names[0]}.bias"
    if not (source.has(where) if source.checkpoint.format == "gguf" else bias):
        return own, None
    return own, rows_of(source.vector(where, channels), ranges)


def rows_of(values: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """Rows in ``ranges``, each ``(start, count)``, one after the other."""
    from sdk.kernels.lazy_torch import torch

    return torch.cat([values[start : start + count] for start, count in ranges])


def shift_weight(source: Source, values: Tensor, number: int, hidden: int, path: str) -> Tensor:
    """The taps of convolutions that make ``x + mu (x' - x)`` of x and the token before:
    ``[number, hidden, 2]``."""
    from sdk.kernels.lazy_torch import torch

    if values.numel() != number * hidden:
        raise CheckpointError(
            f"{path}: expected {number} times {hidden} numbers, found shape {list(values.shape)}"
        )
    values = values.reshape(number, hidden)
    return torch.stack([values, 1 - values], dim=2).contiguous().to(source.ops.device)


def decay_rates(
    source: Source, path: str, *shape: int, stored: tuple[int, ...] | None = None
) -> Tensor:
    """The rate at which each head, or each number of a channel's state, forgets, below 0: float32
    ``shape``. Folders hold its logarithm, as ``stored`` (default: ``shape``); llama.cpp's converter
    has computed it."""
    if source.has(f"{path}.A"):
        return source.vector(f"{path}.A", *shape)
    logarithm = source.vector(f"{path}.A_log", *(stored or shape)).reshape(shape)
    import numpy as np

    from sdk.kernels.lazy_torch import torch

    return torch.from_numpy(-np.exp(logarithm.cpu().numpy())).to(source.ops.device)
