"""8-bit floats: e4m3 with a float32 scale per tensor, output channel or block of 128 x 128.

The largest magnitude under a scale becomes 448, the largest e4m3 value. Values are clamped before
the cast, which would turn larger ones into NaN. No calibration is needed: files that ask for
quantized activations have them quantized the same way, token by token, at run time.
"""

from __future__ import annotations

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.weights.layouts import Float8

LARGEST = 448.0
_BLOCK = 128


def to_float8(weight: Tensor, share: str) -> Float8:
    """``weight``, float32 ``[N, K]``, in e4m3 with a scale per ``share``.

    ``share`` is ``"tensor"``, ``"channel"`` or ``"block"``."""
    rows, columns = weight.shape
    block = block_of(share, (rows, columns))
    short = (-rows % block[0], -columns % block[1])
    padded = torch.nn.functional.pad(weight, (0, short[1], 0, short[0]))
    tiles = padded.reshape(-(-rows // block[0]), block[0], -(-columns // block[1]), block[1])
    largest = tiles.abs().amax((1, 3))
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    scaled = (tiles / scale[:, None, :, None]).clamp_(-LARGEST, LARGEST)
    values = scaled.reshape(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn)
    return Float8(values, scale, block)


def block_of(share: str, shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    rows, columns = shape
    return {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "block": (min(_BLOCK, rows), min(_BLOCK, columns)),
    }[share]
