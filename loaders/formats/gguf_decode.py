"""GGUF tensors to runtime layouts: every value exactly as the file defines it.

Quantized types keep the bytes of their blocks, F32, F16 and BF16 their float type; both are views
of the file wherever its alignment allows, so that nothing is copied before a kernel packs them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdk.kernels.layouts import BLOCK_TYPES, Blocks, Dense, Layout
from sdk.loaders.formats.gguf_types import GgufType
from sdk.quant.errors import CheckpointError, UnsupportedError

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: Byte offsets of the float16 scales inside one block.
_SCALES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,),
    "q2_k": (80, 82), "q3_k": (108,), "q4_k": (0, 2), "q5_k": (0, 2), "q6_k": (208,),
    "iq4_nl": (0,), "iq4_xs": (0,), "mxfp4": (),
}  # fmt: skip

#: The types that run, by their names in GGUF_TYPES.
SUPPORTED_TYPES = (*_FLOATS, *(name.upper() for name in BLOCK_TYPES))


def decode_matrix(
    kind: GgufType,
    data: NDArray[np.uint8],
    columns: int,
    source: str,
) -> Layout:
    """The rows of one tensor as a layout.

    Args:
        kind: the type of the tensor.
        data: uint8 ``[rows, bytes per row]``; may be a view of the file.
        columns: values per row.
        source: file and tensor, for errors.

    Returns:
        A layout that shares memory with ``data``, except floats that are not aligned.

    Raises:
        UnsupportedError: a type that does not run yet.
        CheckpointError: a scale that is not finite.
    """
    if kind.name in _FLOATS:
        return Dense(_dense(data, _FLOATS[kind.name]))
    name = kind.name.lower()
    if name in BLOCK_TYPES:
        for offset in _SCALES[name]:
            _check_finite(data, kind.nbytes, offset, source)
        writable = data if data.flags.writeable else data.copy()
        return Blocks((data.shape[0], columns), name, torch.from_numpy(writable))
    raise UnsupportedError(
        f"{source}: the tensor type {kind.name} is not run yet; take or make a file with "
        f"{', '.join(SUPPORTED_TYPES)}, for example by "
        "`llama-quantize --allow-requantize IN OUT Q4_K_M`"
    )


def _dense(data: NDArray[np.uint8], dtype: torch.dtype) -> Tensor:
    aligned = data.__array_interface__["data"][0] % dtype.itemsize == 0
    usable = aligned and data.flags.c_contiguous and data.flags.writeable
    return torch.from_numpy(data if usable else data.copy()).view(dtype)


def _check_finite(data: NDArray[np.uint8], block: int, offset: int, source: str) -> None:
    """The float16 at byte ``offset`` of every block."""
    words = data.reshape(data.shape[0], -1, block)[:, :, offset : offset + 2]
    exponents = words[:, :, 1] & 0x7C  # little-endian; all ones: infinite or not a number
    if not exponents.size or exponents.max() < 0x7C:
        return
    row, at = np.argwhere(exponents == 0x7C)[0]
    found = words[row, at].copy().view("<f2")[0]
    raise CheckpointError(f"{source}: a scale in row {row} is {found}, expected a finite number")
