"""AutoRound folders: tensors as in GPTQ or AWQ files, depending on ``packing_format``.

``auto_round:auto_gptq`` is GPTQ's first version without ``g_idx``, ``auto_round:auto_awq`` is AWQ's
gemm, and ``auto_round`` or ``auto_round:gptqmodel`` is GPTQ's second version (plain zero points).
Source: auto-round (export/export_to_autoround/export.py, inference/backend.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.kernels.weights.layouts import Affine
from sdk.loaders.formats import awq, gptq
from sdk.loaders.formats.quantized import unsupported
from sdk.loaders.formats.stored_layer import StoredLayer
from sdk.quant.permuted import Permuted

ENDINGS = (".qweight",)
COMPANIONS = (".qzeros", ".scales", ".g_idx")
#: Values of ``packing_format`` for other types than integers.
_OTHERS = ("fp8", "nvfp", "nv_fp", "mxfp", "mx_fp", "llm_compressor", "fake", "mlx")
_ROTATIONS = ("rotation_config", "transform_config", "spinquant_config")

Settings = gptq.Settings | awq.Settings


def settings(config: Mapping[str, Any], source: str) -> Settings:
    """
    Raises:
        CheckpointError: see ``gptq.layer_settings`` and ``awq.settings``.
        UnsupportedError: anything other than integer weights alone.
    """
    packing = str(config.get("packing_format") or "auto_round:auto_gptq").lower()[:80]
    kind = str(config.get("data_type") or "int")[:40]
    if any(name in packing for name in _OTHERS) or not kind.startswith("int"):
        raise unsupported(source, f"auto-round with {packing} and data_type {kind}")
    activations = config.get("act_bits")
    if isinstance(activations, int) and activations <= 8:
        raise unsupported(source, f"auto-round with activations of {activations} bits")
    rotation = next((name for name in _ROTATIONS if config.get(name)), None)
    if rotation is not None:
        raise unsupported(source, f"auto-round with rotated weights: {rotation}")
    if "awq" in packing:
        return awq.settings({**config, "version": "gemm"}, source)
    second = "gptq" not in packing or "gptqmodel" in packing
    return gptq.layer_settings(config, config.get("extra_config"), source, (not second, False))


def outline(layer: StoredLayer, settings: Settings) -> tuple[tuple[int, int], str]:
    """See :class:`sdk.loaders.formats.stored_layer.Format`."""
    if isinstance(settings, awq.Settings):
        return awq.outline(layer, settings)
    return gptq.outline(layer, settings)


def decode(layer: StoredLayer, settings: Settings) -> Affine | Permuted:
    """See :class:`sdk.loaders.formats.stored_layer.Format`."""
    if isinstance(settings, awq.Settings):
        return awq.decode(layer, settings)
    return gptq.decode(layer, settings)
