"""FBGEMM's FP8 (``quant_method: fbgemm_fp8``): float8_e4m3fn with a scale per row.

``activation_scale_ub`` and ``P.input_scale_ub`` bound the scales of activations, which are not
rounded to 8-bit floats here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.kernels.layouts import Float8
from sdk.loaders.formats import scales
from sdk.loaders.formats.scales import FLOAT8, float8, matrix
from sdk.loaders.formats.stored_layer import StoredLayer

ENDINGS = (".weight_scale",)
BESIDE = (".weight", ".input_scale", ".input_scale_ub")


def settings(config: Mapping[str, Any], source: str) -> None:
    """Nothing: the tensors of a layer say all."""


def outline(layer: StoredLayer, settings: None) -> tuple[tuple[int, int], str]:
    """See :class:`sdk.loaders.formats.stored_layer.Format`."""
    return scales.outline(layer, ".weight", FLOAT8), FLOAT8[layer.stored(".weight").dtype]


def decode(layer: StoredLayer, settings: None) -> Float8:
    """
    Raises:
        CheckpointError: the tensors of the layer disagree.
    """
    layer.skip(".input_scale")
    layer.skip(".input_scale_ub")
    return float8(layer, matrix(layer, ".weight", tuple(FLOAT8)), ".weight", ".weight_scale")
