"""FBGEMM's FP8 (``quant_method: fbgemm_fp8``): float8_e4m3fn with a scale per row.

Activations are quantized to the same type, with a scale per token. ``activation_scale_ub``, or a
layer's ``P.input_scale_ub``, is an upper bound on the magnitude from which the scale is computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sdk.kernels.weights.layouts import ActivationScheme, Float8
from sdk.loaders.formats import scales
from sdk.loaders.formats.activations import positive
from sdk.loaders.formats.scales import FLOAT8, float8, matrix
from sdk.loaders.formats.stored_layer import StoredLayer
from sdk.quant.errors import CheckpointError

ENDINGS = (".weight_scale",)
COMPANIONS = (".weight", ".input_scale", ".input_scale_ub")


def settings(config: Mapping[str, Any], source: str) -> float:
    """The bound on magnitudes; infinity if there is none.

    Raises:
        CheckpointError: it is not a positive number.
    """
    bound = config.get("activation_scale_ub")
    if bound is None:
        return math.inf
    if type(bound) not in (int, float) or not 0 < bound < 2.0**126:
        raise CheckpointError(
            f"{source}: activation_scale_ub is {str(bound)[:80]}, expected a positive number"
        )
    return float(bound)


def outline(layer: StoredLayer, settings: float) -> tuple[tuple[int, int], str]:
    """See :class:`sdk.loaders.formats.stored_layer.Format`."""
    return scales.outline(layer, ".weight", FLOAT8), FLOAT8[layer.stored(".weight").dtype]


def decode(layer: StoredLayer, settings: float) -> Float8:
    """
    Raises:
        CheckpointError: the tensors of the layer disagree.
    """
    layer.skip(".input_scale")
    limit = positive(layer, ".input_scale_ub") if layer.has(".input_scale_ub") else settings
    layout = float8(layer, matrix(layer, ".weight", tuple(FLOAT8)), ".weight", ".weight_scale")
    return replace(layout, inputs=ActivationScheme("e4m3", limit=limit))
