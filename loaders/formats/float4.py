"""4-bit floats (e2m1), two in a byte with the even column in the low half, as in `Affine`."""

from __future__ import annotations

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.weights.layouts import E2M1, Affine
from sdk.loaders.formats.scales import exponents
from sdk.loaders.formats.stored_layer import StoredLayer

#: Columns that share a scale.
NVFP4_GROUP, MXFP4_GROUP = 16, 32


def nvfp4(layer: StoredLayer, packed: Tensor, ending: str, factor: float) -> Affine:
    """Groups of 16 with an 8-bit float as scale, and ``factor`` for the whole matrix.

    Args:
        layer: where to read the scales.
        packed: uint8 ``[N, K / 2]``.
        ending: of the scales, float8_e4m3fn ``[N, K / 16]``.
        factor: multiplies every scale.

    Raises:
        CheckpointError: scales have another shape, or one is not finite.
    """
    if not abs(factor) < 2.0**127:
        raise layer.fail(ending, f"is multiplied by {factor}, expected a finite factor")
    scale = layer.read(ending, ("F8_E4M3",))
    shape = _shape(layer, packed, ending, scale, NVFP4_GROUP)
    if (scale.view(torch.uint8).numpy() & 0x7F == 0x7F).any():
        raise layer.fail(ending, "a scale is not a finite number")
    return Affine(
        shape,
        4,
        NVFP4_GROUP,
        packed,
        scale,
        table=torch.tensor(E2M1),
        super_scale=torch.full((shape[0], 1), factor),
        super_group=shape[1],
        name="nvfp4",
    )


def mxfp4(layer: StoredLayer, packed: Tensor, ending: str) -> Affine:
    """Groups of 32 with a power of two as scale: uint8 ``[N, K / 2]``, scales ``[N, K / 32]``.

    Raises:
        CheckpointError: scales have another shape, or one is not a number.
    """
    scale = exponents(layer, ending)
    _shape(layer, packed, ending, scale, MXFP4_GROUP)
    return mxfp4_matrix(packed, scale)


def mxfp4_matrix(packed: Tensor, scale: Tensor) -> Affine:
    """The layout of packed uint8 ``[N, K / 2]`` and scales float8_e8m0fnu ``[N, K / 32]``."""
    shape = (packed.shape[0], packed.shape[1] * 2)
    return Affine(shape, 4, MXFP4_GROUP, packed, scale, table=torch.tensor(E2M1), name="mxfp4")


def _shape(
    layer: StoredLayer, packed: Tensor, ending: str, scale: Tensor, group: int
) -> tuple[int, int]:
    rows, columns = packed.shape[0], packed.shape[1] * 2
    grid = (rows, -(-columns // group))
    if tuple(scale.shape) != grid:
        raise layer.fail(
            ending,
            f"scales of shape {list(scale.shape)}, expected {list(grid)} for {[rows, columns]} in "
            f"groups of {group}",
        )
    return rows, columns
