"""FP8 folders (``quant_method: fp8``): an 8-bit matrix ``P.weight`` with a float scale beside it.

``P.weight_scale_inv`` holds a number per block of ``weight_block_size`` (the last blocks are cut),
``P.weight_scale`` one number or one per row. Both multiply, whatever the name says. Which layers
are 8-bit is seen from their tensors; ``input_scale`` is for activations, which are not rounded to 8
bits here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sdk.kernels.layouts import Float8
from sdk.quant.errors import CheckpointError, UnsupportedError

#: Names of the 8-bit types in safetensors files.
FLOAT8 = ("F8_E4M3", "F8_E5M2")
#: What follows the name of a layer in the names of its scales.
SCALES = (".weight_scale_inv", ".weight_scale")
_SCALE_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Float8Settings:
    """What ``quantization_config`` says: rows and columns of a block, or no blocks."""

    block: tuple[int, int] | None


def float8_settings(settings: Mapping[str, Any], source: str) -> Float8Settings:
    """
    Raises:
        CheckpointError: the block size is no pair of positive integers.
        UnsupportedError: the scales divide, as one program writes them under the same names.
    """
    if "weight_scale_method" in settings:
        raise UnsupportedError(
            f"{source}: weight_scale_method in quantization_config: scales that divide are not run "
            "yet; open the model in F32, F16 or BF16, or as a GGUF file"
        )
    block = settings.get("weight_block_size")
    if block is None:
        return Float8Settings(None)
    sound = isinstance(block, list) and len(block) == 2
    if not sound or any(type(size) is not int or size < 1 for size in block):
        raise CheckpointError(
            f"{source}: weight_block_size is {str(block)[:80]}, expected [rows, columns]"
        )
    return Float8Settings((block[0], block[1]))


def scaled_matrix(values: Tensor, scale: Tensor, settings: Float8Settings, source: str) -> Float8:
    """
    Args:
        values: ``[N, K]`` in one of torch's 8-bit float types.
        scale: one number, ``[N]`` or ``[N, 1]``, or one number per block.
        settings: the block size, when there are blocks.
        source: file and tensor of the scale, for errors.

    Raises:
        CheckpointError: the scale has another shape or type, or is not finite.
    """
    rows, columns = values.shape
    if scale.dtype not in _SCALE_TYPES:
        raise CheckpointError(f"{source}: a scale in {scale.dtype}, expected a float type")
    scale = scale.to(torch.float32, copy=True)
    if not bool(scale.isfinite().all()):
        raise CheckpointError(f"{source}: a scale is not a finite number")
    if scale.numel() == 1:
        return Float8(values, scale.reshape(1, 1), (rows, columns))
    if settings.block is None:
        block, grid = (1, columns), (rows, 1)
        scale = scale.reshape(-1, 1) if scale.dim() == 1 else scale
    else:
        block = settings.block
        grid = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scale.shape) != grid:
        raise CheckpointError(
            f"{source}: scales of shape {list(scale.shape)}, expected {list(grid)} for "
            f"{[rows, columns]} in blocks of {list(block)}"
        )
    return Float8(values, scale, block)
