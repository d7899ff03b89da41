"""ModelOpt (``quant_method: modelopt``, or hf_quant_config.json): 8- and 4-bit floats.

``P.weight`` is float8_e4m3fn ``[N, K]`` with ``P.weight_scale`` for the tensor (FP8), every row
(FP8_PER_CHANNEL_PER_TOKEN), 128 x 128 block (FP8_PB_WO, stored ``[., 1, ., 1]``) or a power of two
for 32 columns (MXFP8); or uint8 ``[N, K / 2]``, two e2m1 floats each, with a float8_e4m3fn scale
for 16 columns and ``P.weight_scale_2`` for all, which multiplies (NVFP4). The tensors tell which it
is, so MIXED_PRECISION needs nothing of its own. Source: ModelOpt's checkpoints as vLLM reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.kernels.layouts import Layout
from sdk.loaders.formats import scales
from sdk.loaders.formats.float4 import MXFP4_GROUP, nvfp4
from sdk.loaders.formats.scales import EXPONENTS, float8, matrix, number
from sdk.loaders.formats.stored_layer import StoredLayer
from sdk.quant.errors import CheckpointError, UnsupportedError

ENDINGS = (".weight_scale",)
BESIDE = (".weight", ".weight_scale_2", ".input_scale")
_ALGORITHMS = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_BLOCK_SCALES", "MXFP8"),
    *("NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"),
)
#: Rows and columns that may share a scale: 128 x 128, or 32 of a row.
_BLOCKS = ((128, 128), (1, MXFP4_GROUP))


def settings(config: Mapping[str, Any], source: str) -> None:
    """Nothing: the tensors of a layer say all.

    Raises:
        CheckpointError: no ``quant_algo`` is named.
        UnsupportedError: one that is not run.
    """
    inner = config.get("quantization")
    algorithm = (inner if isinstance(inner, Mapping) else config).get("quant_algo")
    if not isinstance(algorithm, str):
        raise CheckpointError(
            f"{source}: quant_algo is {str(algorithm)[:80]}, expected one of {_said()}"
        )
    if algorithm.upper() not in _ALGORITHMS:
        raise UnsupportedError(
            f"{source}: the quant_algo {algorithm[:80]!r} of ModelOpt is not run, expected one of "
            f"{_said()}"
        )


def _said() -> str:
    return ", ".join(_ALGORITHMS)


def outline(layer: StoredLayer, settings: None) -> tuple[tuple[int, int], str]:
    """See :class:`sdk.loaders.formats.stored_layer.Format`."""
    rows, columns = scales.outline(layer, ".weight", ("F8_E4M3", "U8"))
    if layer.stored(".weight").dtype == "U8":
        return (rows, columns * 2), "nvfp4"
    return (rows, columns), "mxfp8" if layer.stored(".weight_scale").dtype in EXPONENTS else "fp8"


def decode(layer: StoredLayer, settings: None) -> Layout:
    """The layout of a layer.

    Raises:
        CheckpointError: its tensors disagree.
    """
    shape, numerics = outline(layer, settings)
    layer.skip(".input_scale")
    if numerics != "nvfp4":
        values = matrix(layer, ".weight", ("F8_E4M3",))
        return float8(layer, values, ".weight", ".weight_scale", _BLOCKS)
    layer.check_shape(".weight", shape)
    packed = layer.read(".weight", ("U8",))
    return nvfp4(layer, packed, ".weight_scale", number(layer, ".weight_scale_2"))
