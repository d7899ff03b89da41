"""BitNet (``quant_method: bitnet``): ternary weights with one scale, int8 activations per token.

``P.weight`` uint8 ``[N / 4, K]``: row r of a quarter holds the rows r, N / 4 + r, N / 2 + r and
3 N / 4 + r of the matrix, two bits each, the first in the lowest; a weight is the code minus 1.
``P.weight_scale`` is one number, by which ``bitlinear`` divides and ``autobitlinear`` multiplies.
Source: transformers 5.24, `integrations/bitnet.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sdk.kernels.lazy_torch import torch
from sdk.kernels.weights.layouts import ActivationScheme, Affine
from sdk.loaders.formats import scales
from sdk.loaders.formats.bit_streams import packed_matrix
from sdk.loaders.formats.stored_layer import StoredLayer
from sdk.quant.errors import CheckpointError, UnsupportedError

ENDINGS = (".weight_scale",)
COMPANIONS = (".weight",)
#: Values of a setting, the default first.
_CLASSES = ("bitlinear", "autobitlinear")
_MODES = ("offline", "online")


def settings(config: Mapping[str, Any], source: str) -> str:
    """The class of linear layers, which says what the scale does.

    Raises:
        CheckpointError: a setting has an unknown value.
        UnsupportedError: weights are to be rounded while the model runs, or inputs have a norm.
    """
    kind, mode = (
        _one_of(config, source, key, expected)
        for key, expected in (("linear_class", _CLASSES), ("quantization_mode", _MODES))
    )
    if mode == "online":
        raise UnsupportedError(
            f"{source}: quantization_mode: expected 'offline', found 'online': its weights are "
            "those before rounding, for training; open the folder with packed weights or a GGUF "
            "file of the model"
        )
    if config.get("use_rms_norm"):
        raise UnsupportedError(
            f"{source}: use_rms_norm: expected false, found {str(config['use_rms_norm'])[:80]}: a "
            "norm of its own before each matrix is not supported"
        )
    return kind


def _one_of(config: Mapping[str, Any], source: str, key: str, expected: tuple[str, ...]) -> str:
    found = config.get(key, expected[0])
    if found not in expected:
        raise CheckpointError(
            f"{source}: {key}: expected {' or '.join(map(repr, expected))}, found "
            f"{str(found)[:80]!r}"
        )
    return str(found)


def outline(layer: StoredLayer, settings: str) -> tuple[tuple[int, int], str]:
    """See :class:`sdk.loaders.formats.stored_layer.Format`."""
    rows, columns = scales.outline(layer, ".weight", ("U8",))
    return (rows * 4, columns), "w2"


def decode(layer: StoredLayer, settings: str) -> Affine:
    """
    Raises:
        CheckpointError: the tensors of the layer disagree, a code is 3, or the scale is not
            positive.
    """
    shape, _ = outline(layer, settings)
    layer.check_shape(".weight", shape)
    stored = layer.read(".weight", ("U8",)).numpy()
    scale = scales.number(layer, ".weight_scale")
    if not 2.0**-126 <= scale <= 2.0**126:
        raise layer.fail(".weight_scale", f"is {scale}, expected a positive number")
    if (stored & stored >> 1 & 0x55).any():
        raise layer.fail(".weight", "a code is 3, expected 0 to 2")
    codes = np.concatenate([stored >> shift & 3 for shift in (0, 2, 4, 6)])
    return Affine(
        shape,
        2,
        shape[1],
        torch.from_numpy(packed_matrix(codes, 2)),
        torch.full((shape[0], 1), 1 / scale if settings == "bitlinear" else scale),
        zero=1,
        inputs=ActivationScheme("int", rule="absmax"),
    )
