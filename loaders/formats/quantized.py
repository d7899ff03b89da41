"""Finds out that a safetensors checkpoint is quantized, and by which method.

Methods are recognised by ``quantization_config`` and by the names of the tensors, because either
can be missing or wrong. Only fp8 is decoded yet: `quantization` says which of the others it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sdk.loaders.formats.float8 import SCALES, Float8Settings, float8_settings
from sdk.quant.errors import CheckpointError, UnsupportedError

#: Ends of tensor names that only one method (or family) writes.
_TELLTALES = (
    (".qweight", "GPTQ or AWQ"),
    (".weight_packed", "compressed-tensors"),
    (".weight_scale_inv", "FP8 in blocks"),
    (".weight_scale", "FP8 or INT8 with weight scales"),
    (".SCB", "bitsandbytes LLM.int8"),
    (".quant_state.bitsandbytes__nf4", "bitsandbytes nf4"),
    (".quant_state.bitsandbytes__fp4", "bitsandbytes fp4"),
    ("_proj_blocks", "MXFP4"),
    ("._weight_qdata", "torchao"),
    (".W_q", "HQQ"),
)
#: Files beside config.json in which older tools put the same settings.
CONFIG_FILES = (
    "quantize_config.json",
    "quant_config.json",
    "hf_quant_config.json",
    "quantization_config.json",
)


def quantization(
    config: Mapping[str, Any], tensors: Iterable[str], source: str
) -> Float8Settings | None:
    """The settings of an fp8 checkpoint; None when it is not quantized.

    Raises:
        CheckpointError: ``quantization_config`` is not sound.
        UnsupportedError: any other method, by name.
    """
    found: Float8Settings | None = None
    settings = config.get("quantization_config")
    text = config.get("text_config")
    if settings is None and isinstance(text, Mapping):
        settings = text.get("quantization_config")
    if settings is not None:
        if not isinstance(settings, Mapping):
            raise CheckpointError(
                f"{source}: quantization_config is {str(settings)[:80]}, expected an object"
            )
        method = settings.get("quant_method") or settings.get("producer") or "an unnamed method"
        if method != "fp8":
            raise _unsupported(source, f"quantization_config names {str(method)[:80]}")
        found = float8_settings(settings, source)
    for name in tensors:
        for ending, method in _TELLTALES:
            if name.endswith(ending) and not (found and ending in SCALES):
                raise _unsupported(source, f"tensor {name!r} is written by {method}")
    return found


def _unsupported(source: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"{source}: the weights are quantized ({why}), which comes with the next release; "
        "until then open the model in F32, F16 or BF16, or as a GGUF file"
    )
