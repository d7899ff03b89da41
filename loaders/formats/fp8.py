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

from sdk.kernels.layouts import Float8
from sdk.loaders.formats.stored_layer import StoredLayer
from sdk.quant.errors import CheckpointError, UnsupportedError

ENDINGS = (".weight_scale_inv", ".weight_scale")
BESIDE = (".weight", ".input_scale")
#: The 8-bit types in safetensors' names and ours.
_FLOAT8 = {"F8_E4M3": "fp8", "F8_E5M2": "fp8_e5m2"}
_SCALES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Settings:
    """What ``quantization_config`` says: rows and columns of a block, or no blocks."""

    block: tuple[int, int] | None


def settings(config: Mapping[str, Any], source: str) -> Settings:
    """
    Raises:
        CheckpointError: the block size is no pair of positive integers.
        UnsupportedError: the scales divide, as one program writes them under the same names.
    """
    if "weight_scale_method" in config:
        raise UnsupportedError(
            f"{source}: weight_scale_method in quantization_config: scales that divide are not run "
            "yet; open the model in F32, F16 or BF16, or as a GGUF file"
        )
    block = config.get("weight_block_size")
    if block is None:
        return Settings(None)
    sound = isinstance(block, list) and len(block) == 2
    if not sound or any(type(size) is not int or size < 1 for size in block):
        raise CheckpointError(
            f"{source}: weight_block_size is {str(block)[:80]}, expected [rows, columns]"
        )
    return Settings((block[0], block[1]))


def outline(layer: StoredLayer, settings: Settings) -> tuple[tuple[int, int], str]:
    """See :class:`sdk.loaders.formats.stored_layer.Format`."""
    stored = layer.stored(".weight")
    if len(stored.shape) != 2 or stored.dtype not in _FLOAT8:
        raise layer.fail(
            ".weight",
            f"{stored.dtype} of shape {list(stored.shape)}, expected a matrix in "
            f"{' or '.join(_FLOAT8)}",
        )
    shape = (stored.shape[0], stored.shape[1])
    layer.check_shape(".weight", shape)
    return shape, _FLOAT8[stored.dtype]


def decode(layer: StoredLayer, settings: Settings) -> Float8:
    """One scale, one per row (``[N]`` or ``[N, 1]``), or one per block.

    Raises:
        CheckpointError: not one kind of scale, or it has another shape or type, or is not finite.
    """
    (rows, columns), _ = outline(layer, settings)
    present = [ending for ending in ENDINGS if layer.has(ending)]
    if len(present) != 1:
        raise layer.fail(".weight", f"expected one scale beside it, found {' and '.join(present)}")
    ending = present[0]
    values = layer.read(".weight", tuple(_FLOAT8))
    scale = layer.read(ending, _SCALES).to(torch.float32, copy=True)
    layer.skip(".input_scale")
    if not bool(scale.isfinite().all()):
        raise layer.fail(ending, "a scale is not a finite number")
    if scale.numel() == 1:
        return Float8(values, scale.reshape(1, 1), (rows, columns))
    if settings.block is None:
        block, grid = (1, columns), (rows, 1)
        scale = scale.reshape(-1, 1) if scale.dim() == 1 else scale
    else:
        block = settings.block
        grid = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scale.shape) != grid:
        raise layer.fail(
            ending,
            f"scales of shape {list(scale.shape)}, expected {list(grid)} for {[rows, columns]} "
            f"in blocks of {list(block)}",
        )
    return Float8(values, scale, block)
