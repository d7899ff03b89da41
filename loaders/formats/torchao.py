"""torchao (``quant_method: torchao``) as transformers 5 saves it in safetensors files.

``P._weight_qdata`` holds int8 codes or 8-bit floats ``[N, K]``, ``P._weight_scale`` the scale of a
tensor, row or group of columns, ``P._weight_zero_point`` the zero points. Codes of fewer bits are
also stored one per byte, and are packed here. JSON about the tensor in the file's header says
whether activations are quantized, with the static scale ``P._weight_act_quant_scale`` if it exists,
else per token. The older checkpoints, pickles of tensor classes, are not supported.
Source: torchao 0.18, `torchao/prototype/safetensors`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.weights.layouts import ActivationScheme, Affine, Float8, Layout
from sdk.loaders.formats import scales
from sdk.loaders.formats.activations import ActivationConfig
from sdk.loaders.formats.bit_streams import all_finite
from sdk.loaders.formats.integers import signed_matrix
from sdk.loaders.formats.scales import (
    FLOAT8,
    FLOATS,
    float8,
    floats,
    matrix,
    numerics,
    row_groups,
)
from sdk.loaders.formats.stored_layer import StoredLayer
from sdk.loaders.json_file import parse_json
from sdk.quant.errors import UnsupportedError

ENDINGS = ("._weight_qdata",)
COMPANIONS = (
    *("._weight_scale", "._weight_zero_point"),
    *("._weight_act_quant_scale", "._weight_act_quant_zero_point", "._weight_act_pre_scale"),
)
_CODES, _SCALE, _POINTS = *ENDINGS, *COMPANIONS[:2]
_INPUT_SCALE, _INPUT_POINT, _INPUT_FACTORS = COMPANIONS[2:]
_KINDS = ("Int8Tensor", "IntxUnpackedToInt8Tensor", "Float8Tensor")
#: Keys of an object in the JSON.
_ENTRY = ("_type", "_data")
#: The JSON in the header about one tensor has 200 to 500 bytes.
_MAX_TEXT = 4096


def settings(config: Mapping[str, Any], source: str) -> None:
    """Nothing: every layer describes itself."""


def outline(layer: StoredLayer, settings: None) -> tuple[tuple[int, int], str]:
    """See :class:`sdk.loaders.formats.stored_layer.Format`."""
    shape = scales.outline(layer, _CODES, ("I8", *FLOAT8))
    kind = FLOAT8.get(layer.stored(_CODES).dtype)
    return shape, kind or numerics(layer, _SCALE, _bits(_described(layer)), shape[1])


def decode(layer: StoredLayer, settings: None) -> Layout:
    """The layout of a layer.

    Raises:
        CheckpointError: its tensors disagree.
        UnsupportedError: it has another of torchao's types.
    """
    described = _described(layer)
    layout = _weights(layer, described)
    return replace(layout, inputs=_inputs(layer, described))


def _weights(layer: StoredLayer, described: Mapping[str, Any]) -> Affine | Float8:
    values = matrix(layer, _CODES, ("I8", *FLOAT8))
    if values.dtype != torch.int8:
        return float8(layer, values, _CODES, _SCALE)
    shape = (values.shape[0], values.shape[1])
    scale, group = row_groups(layer, _SCALE, floats(layer, _SCALE), shape)
    points = _points(layer, scale) if layer.has(_POINTS) else None
    if points is None or points.dtype == torch.int8:
        return signed_matrix(layer, _CODES, values, scale, group, points, range(2, 9))
    minus = scale.to(torch.float32) * points.to(torch.float32)
    if not all_finite(minus):
        raise layer.fail(_POINTS, "times its scale is not a finite number")
    return Affine(shape, 8, group, values.view(torch.uint8), scale, minus=minus, signed=True)


def _described(layer: StoredLayer) -> Mapping[str, Any]:
    """The JSON about the tensor in the file's header, parsed; empty if there is none.

    Raises:
        UnsupportedError: this kind of tensor is not supported.
    """
    name = layer.stored(_CODES).name.removesuffix(_CODES) + ".weight"
    text = layer.metadata.get(name)
    if text is None:
        return {}
    if len(text) > _MAX_TEXT:
        raise layer.fail(_CODES, f"described by {len(text)} characters of metadata")
    described = parse_json(text.encode(), f"metadata of {name}")
    kind = described.get("_type")
    if kind not in _KINDS:
        raise UnsupportedError(
            f"{layer.fail(_CODES, 'packed as ' + str(kind)[:80])}, expected {' or '.join(_KINDS)}; "
            "quantize to 8-bit or unpacked weights instead"
        )
    return described


def _bits(described: Mapping[str, Any]) -> int:
    target = re.search(r"'target_dtype': .*?int([1-8])\b", str(described))
    return 8 if target is None else int(target[1])


def _inputs(layer: StoredLayer, described: Mapping[str, Any]) -> ActivationScheme | None:
    """How activations are quantized. A scale per tensor would depend on the other tokens of a
    step, and is replaced by one per token.

    Raises:
        UnsupportedError: this kind of quantization is not supported.
    """
    if layer.has(_INPUT_FACTORS):
        raise UnsupportedError(
            f"{layer.fail(_INPUT_FACTORS, 'factors of activations')}, which are not supported; "
            "expected a checkpoint that folds them into the layers before"
        )
    data = described.get("_data")
    said = data if isinstance(data, Mapping) else {}
    if "int8_asym_per_token" in str(said.get("activation_quantization")).lower():
        return ActivationScheme("int", symmetric=False)
    rounding = said.get("act_quant_kwargs")
    if rounding is None:
        return None
    kind, data = (rounding.get(key) if isinstance(rounding, Mapping) else None for key in _ENTRY)
    options = data if isinstance(data, Mapping) else {}
    if kind == "QuantizeTensorToInt8Kwargs":
        symmetric = "asym" not in str(options.get("mapping_type")).lower()
        bits = 7 if options.get("reduce_range") is True else 8
        scheme = ActivationScheme("int", bits, symmetric=symmetric)
    elif kind == "QuantizeTensorToFloat8Kwargs":
        scheme = ActivationScheme("e4m3")
    else:
        raise UnsupportedError(
            f"{layer.fail(_CODES, 'activations quantized by ' + str(kind)[:80])}, which is not "
            "supported"
        )
    static = ActivationConfig(scheme, layer.has(_INPUT_SCALE))
    return static.of(layer, _INPUT_SCALE, _INPUT_POINT)


def _points(layer: StoredLayer, scale: Tensor) -> Tensor:
    """Zero points in the shape of ``scale``: int8 if they are integers."""
    points = layer.read(_POINTS, ("I8", *FLOATS))
    if points.is_floating_point():
        points = floats(layer, _POINTS)
    if points.numel() == 1:
        points = points.reshape(1, 1).expand(scale.shape).contiguous()
    if points.dim() == 1:
        points = points.reshape(-1, 1)
    if points.shape != scale.shape:
        raise layer.fail(
            _POINTS, f"shape {list(points.shape)}, expected that of scales, {list(scale.shape)}"
        )
    whole = points.is_floating_point() and bool(
        ((points == points.round()) & (points.abs() < 128)).all()
    )
    return points.to(torch.int8) if whole else points
