"""ModelOpt (``quant_method: modelopt``, or hf_quant_config.json): 8- and 4-bit floats.

``P.weight`` is float8_e4m3fn ``[N, K]`` with ``P.weight_scale`` for the tensor (FP8), every row
(FP8_PER_CHANNEL_PER_TOKEN), 128 x 128 block (FP8_PB_WO, stored ``[., 1, ., 1]``) or a power of two
for 32 columns (MXFP8); or uint8 ``[N, K / 2]``, two e2m1 floats each, with a float8_e4m3fn scale
for 16 columns and a factor ``P.weight_scale_2`` for all (NVFP4). The tensors determine the format,
so MIXED_PRECISION needs no special case. With a ``P.input_scale`` (except for W4A16_NVFP4)
activations are quantized too: to 8-bit floats by this scale, or to e2m1 in groups of 16, whose
scales are divided by it and become 8-bit floats. FP8_PER_CHANNEL_PER_TOKEN quantizes activations
per token, MXFP8 in groups of 32. Source: ModelOpt's checkpoints as vLLM reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sdk.kernels.weights.layouts import ActivationScheme, Layout
from sdk.loaders.formats import scales
from sdk.loaders.formats.activations import positive
from sdk.loaders.formats.float4 import MXFP4_GROUP, NVFP4_GROUP, nvfp4
from sdk.loaders.formats.scales import EXPONENTS, float8, matrix, number
from sdk.loaders.formats.stored_layer import StoredLayer
from sdk.quant.errors import CheckpointError, UnsupportedError

ENDINGS = (".weight_scale",)
COMPANIONS = (".weight", ".weight_scale_2", ".input_scale")
_ALGORITHMS = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_BLOCK_SCALES", "MXFP8"),
    *("NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"),
)
#: Rows and columns that may share a scale: 128 x 128, or 32 of a row.
_BLOCKS = ((128, 128), (1, MXFP4_GROUP))


def settings(config: Mapping[str, Any], source: str) -> str:
    """The ``quant_algo``.

    Raises:
        CheckpointError: there is no ``quant_algo``.
        UnsupportedError: it is not supported.
    """
    inner = config.get("quantization")
    algorithm = (inner if isinstance(inner, Mapping) else config).get("quant_algo")
    if not isinstance(algorithm, str):
        raise CheckpointError(
            f"{source}: quant_algo is {str(algorithm)[:80]}, expected one of {_said()}"
        )
    if algorithm.upper() not in _ALGORITHMS:
        raise UnsupportedError(
            f"{source}: ModelOpt's quant_algo {algorithm[:80]!r} is not supported, expected one of "
            f"{_said()}"
        )
    return algorithm.upper()


def _said() -> str:
    return ", ".join(_ALGORITHMS)


def outline(layer: StoredLayer, settings: str) -> tuple[tuple[int, int], str]:
    """See :class:`sdk.loaders.formats.stored_layer.Format`."""
    rows, columns = scales.outline(layer, ".weight", ("F8_E4M3", "U8"))
    if layer.stored(".weight").dtype == "U8":
        return (rows, columns * 2), "nvfp4"
    return (rows, columns), "mxfp8" if layer.stored(".weight_scale").dtype in EXPONENTS else "fp8"


def decode(layer: StoredLayer, settings: str) -> Layout:
    """The layout of a layer.

    Raises:
        CheckpointError: its tensors disagree.
    """
    shape, numerics = outline(layer, settings)
    layer.skip(".input_scale")
    inputs = _inputs(layer, numerics, settings)
    if numerics != "nvfp4":
        values = matrix(layer, ".weight", ("F8_E4M3",))
        weights = float8(layer, values, ".weight", ".weight_scale", _BLOCKS)
        return replace(weights, inputs=inputs)
    layer.check_shape(".weight", shape)
    packed = layer.read(".weight", ("U8",))
    factor = number(layer, ".weight_scale_2")
    return replace(nvfp4(layer, packed, ".weight_scale", factor), inputs=inputs)


def _inputs(layer: StoredLayer, numerics: str, algorithm: str) -> ActivationScheme | None:
    if layer.has(".input_scale") and algorithm != "W4A16_NVFP4":
        scale = positive(layer, ".input_scale")
        if numerics != "nvfp4":
            return ActivationScheme("e4m3", static=scale)
        return ActivationScheme("e2m1", 4, NVFP4_GROUP, "nv", factor=1 / scale)
    if algorithm == "FP8":
        raise layer.fail(".input_scale", "missing, expected in ModelOpt's FP8")
    if numerics == "mxfp8":
        return ActivationScheme("e4m3", group=MXFP4_GROUP, rule="mx")
    return ActivationScheme("e4m3") if algorithm == "FP8_PER_CHANNEL_PER_TOKEN" else None
