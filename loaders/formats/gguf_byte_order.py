"""Big-endian tensors: swaps the bytes of plain numbers, and of the scales of quantized tensors.

Codes of single bytes are the same in both byte orders. Types with codes in 16- or 32-bit words have
no defined big-endian form (llama.cpp's own converter rejects them) and are not supported.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sdk.loaders.formats.gguf_types import GgufType
from sdk.quant.errors import UnsupportedError

#: Types with words of codes in their blocks.
_UNDEFINED = ("Q5_0", "Q5_1", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ3_XXS")
#: Words to swap that are not float16 scales.
_WORDS = {"IQ4_XS": (2,)}


def to_little_endian(kind: GgufType, data: NDArray[np.uint8], source: str) -> NDArray[np.uint8]:
    """A little-endian copy of ``data``, uint8 ``[rows, bytes per row]``.

    :raises UnsupportedError: the type has no defined big-endian form.
    """
    if kind.name in _UNDEFINED:
        raise UnsupportedError(
            f"{source}: the byte order of {kind.name} is not defined in big-endian files; "
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
