"""Scales of a matrix: checked, and matched to rows, groups of columns or blocks.

Their shapes tell which: one number, one per row, one per row and group of columns, or one per
block. ``quantization_config`` says which groups and blocks are possible; for shapes that fit none
of them, the error names both.
"""

from __future__ import annotations

from collections.abc import Collection

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.weights.layouts import Float8
from sdk.loaders.formats.bit_streams import all_finite
from sdk.loaders.formats.stored_layer import StoredLayer

#: The float types of scales: safetensors' name -> torch type.
FLOATS = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
#: The 8-bit floats: safetensors' name -> torch type.
FLOAT8 = {"F8_E4M3": "fp8", "F8_E5M2": "fp8_e5m2"}
#: Powers of two as bytes: ``2 ** (byte - 127)``; 255 is NaN (OCP Microscaling 1.0, E8M0).
EXPONENTS = ("U8", "F8_E8M0")


def outline(layer: StoredLayer, ending: str, types: Collection[str]) -> tuple[int, int]:
    """Rows and columns of a matrix, from the headers.

    Raises:
        CheckpointError: it is not a matrix, is empty, or has another type.
    """
    stored = layer.stored(ending)
    if len(stored.shape) != 2 or 0 in stored.shape or stored.dtype not in types:
        raise layer.fail(
            ending,
            f"{stored.dtype} of shape {list(stored.shape)}, expected a matrix in "
            f"{' or '.join(types)}",
        )
    return stored.shape[0], stored.shape[1]


def numerics(layer: StoredLayer, ending: str, bits: int, columns: int) -> str:
    """The name of integers of ``bits`` with the scales at ``ending``: ``w4g128``, ``w8``."""
    stored = layer.stored(ending).shape
    groups = stored[1] if len(stored) == 2 else 1
    return f"w{bits}" if groups < 2 else f"w{bits}g{-(-columns // groups)}"


def matrix(layer: StoredLayer, ending: str, types: Collection[str]) -> Tensor:
    """A matrix that is stored unpacked, in its own shape.

    Raises:
        CheckpointError: it is not a matrix, or has another type or shape than expected.
    """
    layer.check_shape(ending, outline(layer, ending, types))
    return layer.read(ending, tuple(types))


def floats(layer: StoredLayer, ending: str) -> Tensor:
    """Scales in the file's own float type.

    Raises:
        CheckpointError: one of them is not finite.
    """
    scale = layer.read(ending, tuple(FLOATS))
    if not all_finite(scale):
        raise layer.fail(ending, "a scale is not a finite number")
    return scale


def number(layer: StoredLayer, ending: str) -> float:
    """The value of a tensor with one element."""
    scale = floats(layer, ending)
    if scale.numel() != 1:
        raise layer.fail(ending, f"shape {list(scale.shape)}, expected one number")
    return float(scale)


def exponents(layer: StoredLayer, ending: str) -> Tensor:
    """Scales that are powers of two, as float8_e8m0fnu.

    Raises:
        CheckpointError: one of them is the byte 255 (NaN).
    """
    scale = layer.read(ending, EXPONENTS).view(torch.uint8)
    if (scale.numpy() == 255).any():
        raise layer.fail(ending, "a scale is 255, which is not a number")
    return scale.view(torch.float8_e8m0fnu)


def row_groups(
    layer: StoredLayer,
    ending: str,
    scale: Tensor,
    shape: tuple[int, int],
    groups: Collection[int] = (),
) -> tuple[Tensor, int]:
    """Scales as ``[N, groups]``, and how many columns a group has.

    Args:
        layer: for errors.
        ending: of the scales' tensor, for errors.
        scale: one number, ``[N]``, ``[N, 1]`` or ``[N, groups]``.
        shape: of the matrix, ``(N, K)``.
        groups: group sizes that the file names; empty: any that divides K.

    Raises:
        CheckpointError: the shape fits none of them.
    """
    rows, columns = shape
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(rows, 1).contiguous(), columns
    if scale.dim() == 1:
        scale = scale.reshape(-1, 1)
    count = scale.shape[1] if scale.dim() == 2 and scale.shape[0] == rows else 0
    if count == 1:
        return scale, columns
    if groups:
        fits = sorted(size for size in groups if -(-columns // size) == count)
    else:
        fits = [columns // count] if count and columns % count == 0 else []
    if not fits:
        said = f"groups of {sorted(groups)}" if groups else "equal groups"
        raise layer.fail(
            ending,
            f"scales of shape {list(scale.shape)}, expected [{rows}, 1] or {said} columns of "
            f"{list(shape)}",
        )
    return scale, fits[0]


def factors(layer: StoredLayer, ending: str, divide: bool) -> Tensor:
    """Scales of 8-bit floats: float32, or powers of two; inverted if they ``divide``.

    Raises:
        CheckpointError: one of them is not finite, or is 0 although it divides.
    """
    powers = layer.stored(ending).dtype in EXPONENTS
    scale = exponents(layer, ending) if powers else floats(layer, ending).to(torch.float32)
    if divide:
        scale = 1 / scale.to(torch.float32)
        if not bool(scale.isfinite().all()):
            raise layer.fail(ending, "a scale is 0, but scales divide in this format")
    return scale


def float8(
    layer: StoredLayer,
    values: Tensor,
    weight: str,
    ending: str,
    blocks: Collection[tuple[int, int]] = (),
    divide: bool = False,
) -> Float8:
    """A matrix of 8-bit floats with its scales.

    Args:
        layer: where to read.
        values: the matrix.
        weight: its ending, for errors.
        ending: of the scales: floats or powers of two, one number, ``[N]``, ``[N, 1]`` or one per
            block (also ``[., 1, ., 1]``).
        blocks: rows and columns of a block, as named by the file.
        divide: the scales divide the weights instead of multiplying them.

    Raises:
        CheckpointError: the shapes disagree, or a number is not finite.
    """
    check_finite(layer, weight, values)
    scale = factors(layer, ending, divide)
    rows, columns = values.shape
    if scale.numel() == 1:
        return Float8(values, scale.reshape(1, 1), (rows, columns))
    if scale.dim() == 4 and scale.shape[1] == scale.shape[3] == 1:
        scale = scale.reshape(scale.shape[0], scale.shape[2])
    if scale.dim() == 1:
        scale = scale.reshape(-1, 1)
    fits: dict[tuple[int, ...], tuple[int, int]] = {
        (-(-rows // high), -(-columns // wide)): (high, wide)
        for high, wide in (*blocks, (1, columns))
    }
    block = fits.get(tuple(scale.shape))
    if block is None:
        expected = " or ".join(
            f"{list(grid)} for {[rows, columns]} in blocks of {list(of)}"
            for grid, of in fits.items()
        )
        raise layer.fail(ending, f"scales of shape {list(scale.shape)}, expected {expected}")
    return Float8(values, scale, block)


def check_finite(layer: StoredLayer, ending: str, values: Tensor) -> None:
    """Reject codes that are not finite: 0x7f of e4m3, 0x7c to 0x7f of e5m2, with either sign."""
    first = 0x7F if values.dtype == torch.float8_e4m3fn else 0x7C
    codes = values.view(torch.uint8).numpy()
    for row in range(0, len(codes), 256):  # in parts that stay in the cache
        found = codes[row : row + 256] & 0x7F
        if int(found.max()) >= first:
            at = row + int((found >= first).any(axis=1).argmax())
            raise layer.fail(ending, f"a weight in row {at} is not a finite number")
