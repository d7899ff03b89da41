"""The experts of gpt-oss (``quant_method: mxfp4``): 4-bit floats of all experts in one tensor.

``P_blocks`` uint8 ``[experts, N, K / 32, 16]`` holds groups of 32 weights, the even one in the low
half of a byte; ``P_scales`` uint8 ``[experts, N, K / 32]`` their powers of two. Rows of
``gate_up_proj`` alternate: gate 0, up 0, gate 1, ...
"""

from __future__ import annotations

from sdk.kernels.layouts import Affine
from sdk.loaders.formats.float4 import mxfp4_matrix
from sdk.loaders.formats.scales import exponents
from sdk.loaders.formats.stored_layer import StoredLayer


def experts(layer: StoredLayer) -> list[Affine]:
    """The ``[N, K]`` matrices of the experts, in their order; the codes lie in the file.

    Raises:
        CheckpointError: the shapes of blocks and scales disagree, or a scale is no number.
    """
    stored = layer.stored("_blocks").shape
    if len(stored) != 4 or 0 in stored or stored[3] != 16:
        raise layer.fail("_blocks", f"shape {list(stored)}, expected [experts, N, K / 32, 16]")
    blocks = layer.read("_blocks", ("U8",)).flatten(2)
    scale = exponents(layer, "_scales")
    if tuple(scale.shape) != stored[:3]:
        raise layer.fail("_scales", f"shape {list(scale.shape)}, expected {list(stored[:3])}")
    return [mxfp4_matrix(blocks[i], scale[i]) for i in range(stored[0])]
