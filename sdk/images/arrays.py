"""Arrays of numpy and torch as pixels."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.api.errors import RequestError
from sdk.images.limits import ImageLimits, check_size

#: One channel is grey, four are RGB and opacity.
_CHANNELS = (1, 3, 4)
_EXPECTED = (
    "expected [H, W], [H, W, C] or [C, H, W] with 1 (grey), 3 (RGB) or 4 (RGBA) channels, uint8 or "
    "floats from 0 to 1"
)


def is_tensor(source: object) -> bool:
    """Whether ``source`` is a tensor of torch; torch is not imported to find out."""
    # Without the class another thread is importing torch, and this is not one of its tensors.
    kind: Any = getattr(sys.modules.get("torch"), "Tensor", None)
    return kind is not None and isinstance(source, kind)


def array_pixels(source: Any, name: str, limits: ImageLimits) -> NDArray[np.uint8]:
    """A numpy array or torch tensor as uint8 ``[H, W, C]``, with C 1, 3 or 4.

    Where the first and the last axis might both be the channels, a tensor's are the first, as
    torchvision has it, and an array's the last, as Pillow and OpenCV have it. Floats are rounded to
    the nearest of 256 values.

    :raises RequestError: another shape or type, or values that are not from 0 to 1.
    """
    shape = tuple(int(side) for side in source.shape)
    tensor = is_tensor(source)
    axis = _channel_axis(shape, first=tensor)
    if axis is None:
        hint = ": pass the images of a batch one by one" if len(shape) == 4 else ""
        raise RequestError(f"{name} is an array of shape {list(shape)}, {_EXPECTED}{hint}")
    height, width = shape[:2] if axis == 2 else shape[1:]
    check_size(height, width, name, limits)
    array = _tensor_array(source, name) if tensor else np.asarray(source)
    if len(shape) == 2:
        array = array[..., None]
    elif axis == 0:
        array = np.moveaxis(array, 0, -1)
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype.kind != "f":
        raise RequestError(
            f"{name} is an array of {array.dtype}, {_EXPECTED}: convert it, as in "
            "array.astype('uint8')"
        )
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 1):  # NaN as well
        raise RequestError(
            f"{name} has floats from {low:g} to {high:g}, expected 0 to 1: divide it by 255, or "
            "undo its normalization"
        )
    values = array.astype(np.float32)
    values *= 255
    return np.ascontiguousarray(np.rint(values, out=values).astype(np.uint8))


def _channel_axis(shape: tuple[int, ...], *, first: bool) -> int | None:
    """Where the channels are, 2 if no axis has them; None if this is not an image."""
    if len(shape) == 2:
        return 2
    if len(shape) != 3:
        return None
    for axis in (0, 2) if first else (2, 0):
        if shape[axis] in _CHANNELS:
            return axis
    return None


def _tensor_array(tensor: Any, name: str) -> NDArray[Any]:
    try:
        tensor = tensor.detach().cpu()
        # numpy has no bfloat16.
        return np.asarray((tensor.float() if tensor.is_floating_point() else tensor).numpy())
    except (NotImplementedError, RuntimeError, TypeError) as error:  # sparse, meta, quantized
        reason = str(error).partition("\n")[0][:100]
        raise RequestError(
            f"{name} is a tensor whose values cannot be read ({reason}): pass a dense one"
        ) from error


__all__ = ["array_pixels", "is_tensor"]
