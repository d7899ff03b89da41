"""Which type the activations between kernels have: a rule over a model's config and the card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sdk.models.auto import model_type, own_model

#: Models whose activations were never meant for float16, which ends at 65504.
WIDE_RANGE = frozenset({"gemma", "gemma2", "gemma3_text"})


def activation_type(
    config: Mapping[str, Any], matrix: torch.dtype, *, exact: bool = False
) -> torch.dtype:
    """See :attr:`sdk.kernels.ops.Ops.activations`, for the model that ``config`` describes.

    ``matrix``: what the device's matrix units multiply best
    (:func:`sdk.kernels.gpu.matrix_type`), float32 without such. A file that says float16 gets that;
    any other, whatever it was quantized from, what the card has. Where that is float16 and the
    model is of ``WIDE_RANGE``, bfloat16 if the card has it, else float32. ``exact`` arithmetic and
    transformers' own code, which computes between our kernels, are float32.
    """
    name = model_type(config)
    if exact or matrix == torch.float32 or own_model(name) is None:
        return torch.float32
    if name in WIDE_RANGE and matrix == torch.float16:
        return torch.float32
    stated = _stated(config)
    if stated == "float16" and name not in WIDE_RANGE:
        return torch.float16
    return matrix


def _stated(config: Mapping[str, Any]) -> str:
    """The floats the model was trained or saved in; a multimodal config says it of its text part.

    transformers writes ``dtype``, ``torch_dtype`` before version 5.
    """
    text = config.get("text_config")
    for values in (text if isinstance(text, Mapping) else {}, config):
        for key in ("dtype", "torch_dtype"):
            if values.get(key) is not None:
                return str(values[key]).removeprefix("torch.")
    return ""
