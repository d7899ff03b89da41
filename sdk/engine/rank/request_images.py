"""The images of one request on a rank: their rows, what their tokens see, and their positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sdk.engine.plan import SequenceSpec
from sdk.kernels.dataclass import dataclass
from sdk.models.vision.image import PromptImage

if TYPE_CHECKING:
    from sdk.models.vision.config import VisionConfig

_Ints = NDArray[np.int32]


@dataclass(slots=True)
class RequestImages:
    """What a rank knows of the images of a request, token by token of the prompt.

    ``ahead``, ``shifts``: see :class:`sdk.kernels.operators.batch.AttentionBatch`; the latter of
    the prompt, int32 ``[axes, num_prompt]``, and ``shift`` that of all tokens behind the images.
    """

    images: tuple[PromptImage, ...]
    ahead: _Ints | None
    shifts: _Ints | None
    shift: int = 0


def images_of(spec: SequenceSpec, num_prompt: int, config: VisionConfig) -> RequestImages:
    """The images of a request that has some."""
    ahead = shifts = None
    shift = 0
    if config.both_ways is not None:
        ahead = np.zeros(num_prompt, np.int32)
        if config.both_ways == "prompt":
            ahead[:] = np.arange(num_prompt - 1, -1, -1)
        for one in spec.images if config.both_ways != "prompt" else ():
            for first, count in one.spans:
                ahead[first : first + count] = np.arange(count - 1, -1, -1)
    if config.axes is not None:
        shifts = np.zeros((3, num_prompt), np.int32)
        for one in spec.images:
            for (first, count), (_, columns) in zip(one.spans, one.image.grids, strict=True):
                at = np.arange(count)
                own = shifts[:, first : first + count]
                own[:] = shift - at
                own[1] += at // columns
                own[2] += at % columns
                shift += max(-(-count // columns), columns) - count
                shifts[:, first + count :] = shift
    return RequestImages(spec.images, ahead, shifts, shift)
