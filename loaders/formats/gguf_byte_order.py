"""Big-endian tensors turned round: all words of a tensor of numbers, the scales of a quantized one.

Codes are bytes in either order. What lies in a block as 16- or 32-bit words of codes has no agreed
place in such files (llama.cpp's own converter refuses those types), and is refused here too.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sdk.loaders.formats.gguf_types import GgufType
from sdk.quant.errors import UnsupportedError

#: Words of codes inside the blocks.
_UNDEFINED = ("Q5_0", "Q5_1", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ3_XXS")
#: Words that are not float16 scales.
_WORDS = {"IQ4_XS": (2,)}


def to_little_endian(kind: GgufType, data: NDArray[np.uint8], source: str) -> NDArray[np.uint8]:
    """A copy of ``data``, uint8 ``[rows, bytes per row]``, as a little-endian file has it.

    :raises UnsupportedError: for a type whose big-endian form nobody has defined.
    """
    if kind.name in _UNDEFINED:
        raise UnsupportedError(
            f"{source}: {kind.name} in a big-endian file, whose order of bytes is not defined; "
            "convert the original model again on a little-endian machine"
        )
    if kind.elements == 1:
        numbers = data.reshape(-1, kind.nbytes)
        turned: NDArray[np.uint8] = np.ascontiguousarray(numbers[:, ::-1]).reshape(data.shape)
        return turned
    turned = data.copy()
    blocks = turned.reshape(len(data), -1, kind.nbytes)
    for at in kind.halves + _WORDS.get(kind.name, ()):
        blocks[:, :, at : at + 2] = blocks[:, :, at : at + 2][:, :, ::-1].copy()
    return turned
