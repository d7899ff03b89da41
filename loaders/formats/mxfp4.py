"""The experts of gpt-oss (``quant_method: mxfp4``): 4-bit floats of all experts in one tensor.

``P_blocks`` uint8 ``[experts, N, K / 32, 16]`` holds groups of 32 weights, the even one in the low
half of a byte; ``P_scales`` uint8 ``[experts, N, K / 32]`` holds their powers of two. Rows of
``gate_up_proj`` alternate: gate 0, up 0, gate 1, ...
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.kernels.weights.layouts import Affine
from sdk.loaders.formats.float4 import mxfp4_matrix
from sdk.loaders.formats.scales import exponents
from sdk.loaders.formats.stored_layer import StoredLayer

ENDINGS = ("_blocks",)
COMPANIONS = ("_scales",)


def settings(config: Mapping[str, Any], source: str) -> None:
    """There are none: the format has no variants."""


def outline(layer: StoredLayer, settings: None) -> tuple[tuple[int, ...], str]:
    """``(experts, N, K)`` and ``"mxfp4"``."""
    experts, rows, groups = _shape(layer)
    return (experts, rows, groups * 32), "mxfp4"


def decode(layer: StoredLayer, settings: None) -> Affine:
    """The matrices of all experts, concatenated: ``[experts * N, K]``, with the file's codes.

    Raises:
        CheckpointError: the shapes of blocks and scales disagree, or a scale is not a number.
    """
    shape = _shape(layer)
    blocks = layer.read("_blocks", ("U8",))
    scale = exponents(layer, "_scales")
    if tuple(scale.shape) != shape:
        raise layer.fail("_scales", f"shape {list(scale.shape)}, expected {list(shape)}")
    return mxfp4_matrix(blocks.flatten(2).flatten(0, 1), scale.flatten(0, 1))


def _shape(layer: StoredLayer) -> tuple[int, int, int]:
    stored = layer.stored("_blocks").shape
    if len(stored) != 4 or 0 in stored or stored[3] != 16:
        raise layer.fail("_blocks", f"shape {list(stored)}, expected [experts, N, K / 32, 16]")
    return stored[0], stored[1], stored[2]
