"""FP8 folders (``quant_method: fp8``): an 8-bit matrix ``P.weight`` with scales.

``P.weight_scale_inv`` holds a scale per block of ``weight_block_size`` (the last blocks may be
partial), ``P.weight_scale`` one scale or one per row. Despite its name, ``weight_scale_inv``
multiplies too, except in files of gptqmodel, whose settings have a ``weight_scale_method``: there
scales divide. Scales may be stored as powers of two (``scale_fmt: ue8m0``). A tensor of all experts
``P [E, N, K]`` has its scales in ``P_scale_inv [E, ., .]``: per block, or per equal part of the
rows (gate and up have one each). Source: transformers 5.2, finegrained_fp8.py. The tensors show
which layers are 8-bit. ``activation_scheme`` tells how activations are quantized: ``static``, by
``input_scale``; ``dynamic``, with a scale per token, or for as many values as a block of the weight
has columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from sdk.kernels.lazy_torch import torch
from sdk.kernels.weights.layouts import ActivationScheme, Float8
from sdk.loaders.formats import scales
from sdk.loaders.formats.activations import ActivationConfig
from sdk.loaders.formats.scales import FLOAT8, check_finite, factors, float8, matrix
from sdk.loaders.formats.stored_layer import StoredLayer
from sdk.quant.errors import CheckpointError, UnsupportedError

#: The third is Mistral's name; the last is for joined experts, whose matrix has no ending.
_EXPERTS = "_scale_inv"
ENDINGS = (".weight_scale_inv", ".weight_scale", ".qscale_weight", _EXPERTS)
_INPUTS = (".input_scale", ".activation_scale", ".qscale_act", "_activation_scale")
COMPANIONS = (".weight", *_INPUTS, "")


@dataclass(frozen=True, slots=True)
class Settings:
    """The contents of ``quantization_config``: rows and columns of a block, or None; and how
    activations are quantized."""

    block: tuple[int, int] | None
    divide: bool = False
    inputs: ActivationConfig | None = None


def settings(config: Mapping[str, Any], source: str) -> Settings:
    """
    Raises:
        CheckpointError: the block size is not a pair of positive integers, or activation_scheme is
            neither dynamic nor static.
        UnsupportedError: scales are applied in an unknown way.
    """
    divide = "weight_scale_method" in config
    semantics = config.get("weight_scale_semantics", "inverse")
    if semantics != "inverse":
        raise UnsupportedError(
            f"{source}: weight_scale_semantics is {str(semantics)[:80]}, which is not supported; "
            "expected inverse"
        )
    block = config.get("weight_block_size")
    if block is None:
        return Settings(None, divide, _inputs(config, 0, source))
    sound = isinstance(block, list) and len(block) == 2
    if not sound or any(type(size) is not int or size < 1 for size in block):
        raise CheckpointError(
            f"{source}: weight_block_size is {str(block)[:80]}, expected [rows, columns]"
        )
    return Settings((block[0], block[1]), divide, _inputs(config, block[1], source))


def _inputs(config: Mapping[str, Any], group: int, source: str) -> ActivationConfig | None:
    scheme = config.get("activation_scheme")
    if scheme is None:
        return None
    if scheme == "static":
        return ActivationConfig(ActivationScheme("e4m3"), static=True)
    if scheme != "dynamic":
        raise CheckpointError(
            f"{source}: activation_scheme is {str(scheme)[:80]!r}, expected dynamic or static"
        )
    powers = config.get("scale_fmt") == "ue8m0"
    return ActivationConfig(
        ActivationScheme("e4m3", group=group, rule="power" if powers else "plain")
    )


def outline(layer: StoredLayer, settings: Settings) -> tuple[tuple[int, ...], str]:
    """See :class:`sdk.loaders.formats.stored_layer.Format`."""
    if layer.has(_EXPERTS):
        stored = layer.stored("")
        return _experts_shape(layer), FLOAT8[stored.dtype]
    shape = scales.outline(layer, ".weight", FLOAT8)
    layer.check_shape(".weight", shape)
    return shape, FLOAT8[layer.stored(".weight").dtype]


def decode(layer: StoredLayer, settings: Settings) -> Float8:
    """One scale, one per row (``[N]`` or ``[N, 1]``), or one per block.

    Raises:
        CheckpointError: there is not exactly one tensor of scales, it has another shape or type,
            or a scale is not finite.
    """
    if layer.has(_EXPERTS):
        return _experts(layer, settings)
    present = [ending for ending in ENDINGS if layer.has(ending)]
    if len(present) != 1:
        raise layer.fail(".weight", f"expected one tensor of scales, found {' and '.join(present)}")
    for ending in _INPUTS:
        layer.skip(ending)
    scale = next((ending for ending in _INPUTS if layer.has(ending)), _INPUTS[0])
    inputs = None if settings.inputs is None else settings.inputs.of(layer, scale)
    values = matrix(layer, ".weight", FLOAT8)
    blocks = () if settings.block is None else (settings.block,)
    layout = float8(layer, values, ".weight", present[0], blocks, settings.divide)
    return replace(layout, inputs=inputs)


def _experts_shape(layer: StoredLayer) -> tuple[int, int, int]:
    stored = layer.stored("")
    if len(stored.shape) != 3 or 0 in stored.shape or stored.dtype not in FLOAT8:
        raise layer.fail(
            "",
            f"{stored.dtype} of shape {list(stored.shape)}, expected [experts, N, K] in "
            f"{' or '.join(FLOAT8)}",
        )
    return stored.shape[0], stored.shape[1], stored.shape[2]


def _experts(layer: StoredLayer, settings: Settings) -> Float8:
    """The matrices of all experts, concatenated: ``[E * N, K]``."""
    count, rows, columns = _experts_shape(layer)
    layer.skip("_activation_scale")
    inputs = settings.inputs
    if inputs is not None and inputs.static:  # one per expert
        layer.warn("static scales of joined experts: activations are not quantized")
        inputs = None
    scheme = None if inputs is None else inputs.of(layer)
    values = layer.read("", tuple(FLOAT8)).flatten(0, 1)
    check_finite(layer, "", values)
    scale = factors(layer, _EXPERTS, settings.divide)
    sound = scale.dim() == 3 and scale.shape[0] == count
    parts, groups = scale.shape[1:] if sound else (0, 0)
    high, wide = settings.block or (rows, columns)
    if parts != -(-rows // high) and parts and rows % parts == 0:
        high = rows // parts
    if not sound or parts != -(-rows // high) or groups != -(-columns // wide):
        raise layer.fail(
            _EXPERTS,
            f"scales of shape {list(scale.shape)} for {[count, rows, columns]} in blocks of "
            f"{list(settings.block or (rows, columns))}",
        )
    if rows % high:  # blocks end with their expert
        of = torch.arange(rows) // high
        return Float8(values, scale[:, of].flatten(0, 1), (1, wide), scheme)
    return Float8(values, scale.flatten(0, 1), (high, wide), scheme)
