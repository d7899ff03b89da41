"""Matrices of integers with one code per byte, as `Affine` layouts."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.weights.layouts import Affine
from sdk.loaders.formats.bit_streams import packed_matrix
from sdk.loaders.formats.stored_layer import StoredLayer


def signed_matrix(
    layer: StoredLayer,
    ending: str,
    values: Tensor,
    scale: Tensor,
    group: int,
    points: Tensor | None = None,
    widths: Collection[int] = (),
) -> Affine:
    """Signed integers, stored one per byte, packed if the file says that fewer bits are enough.

    Args:
        layer: for errors.
        ending: of the matrix, for errors.
        values: int8 ``[N, K]``; may be a view of the file.
        scale: floats ``[N, ceil(K / group)]``.
        group: columns that share a scale.
        points: zero points, int8: one, or as many as scales.
        widths: numbers of bits that the file names for its integers; empty: 8.

    Returns:
        A layout of the smallest width that holds every code and zero point. 8-bit codes without
        zero points share memory with ``values``.

    Raises:
        CheckpointError: a number needs more bits than any of ``widths``, or the zero points have
            another shape.
    """
    shape = (values.shape[0], values.shape[1])
    if points is not None:
        points = _like(layer, ending, points, scale)
    bits = _width(layer, ending, [values] if points is None else [values, points], widths)
    codes = values.view(torch.uint8)
    if bits == 8 and points is None:
        return Affine(shape, 8, group, codes, scale, signed=True)
    half = np.uint8(1 << bits - 1)
    # In two's complement, adding half the range makes codes unsigned; bytes wrap around.
    packed = torch.from_numpy(packed_matrix(codes.numpy() + half, bits))
    if points is None:
        return Affine(shape, bits, group, packed, scale, zero=int(half))
    zeros = torch.from_numpy(packed_matrix(points.view(torch.uint8).numpy() + half, bits))
    return Affine(shape, bits, group, packed, scale, zeros=zeros)


def _like(layer: StoredLayer, ending: str, points: Tensor, scale: Tensor) -> Tensor | None:
    """Zero points in the shape of the scales; None if all are 0."""
    if points.numel() not in (1, scale.numel()):
        raise layer.fail(
            ending,
            f"zero points of shape {list(points.shape)}, expected that of the scales, "
            f"{list(scale.shape)}",
        )
    if not points.numpy().any():
        return None
    return points.expand(scale.shape) if points.numel() == 1 else points.reshape(scale.shape)


def _width(layer: StoredLayer, ending: str, tensors: list[Tensor], widths: Collection[int]) -> int:
    """The smallest of ``widths`` that holds every number in ``tensors``."""
    allowed = sorted(widths) or [8]
    if allowed == [8]:
        return 8
    least = min(int(tensor.numpy().min()) for tensor in tensors)
    greatest = max(int(tensor.numpy().max()) for tensor in tensors)
    for bits in allowed:
        if -1 << bits - 1 <= least and greatest < 1 << bits - 1:
            return bits
    raise layer.fail(
        ending, f"codes from {least} to {greatest}, expected integers of {allowed[-1]} bits"
    )
