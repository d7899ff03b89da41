"""Plain tensors of a tower, which are computed with in numpy or once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.kernels.lazy_torch import torch
from sdk.quant.checkpoint import VISION_ROOT
from sdk.quant.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

    from sdk.models.source import Source


def stored(source: Source, name: str, *shapes: tuple[int, ...], keep: bool = True) -> Tensor:
    """A tensor of the tower in float32 on the host, whose shape is one of these.

    ``keep``: engines with the same weights read it again, without a file.

    :raises CheckpointError: it has another shape.
    """
    path = f"model.{name}"
    found = source.plain(path) if keep else source.checkpoint.tensor(path).to(torch.float32)
    if tuple(found.shape) not in shapes:
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise CheckpointError(
            f"{VISION_ROOT}{name}: expected shape {expected}, found {list(found.shape)}"
        )
    return found
