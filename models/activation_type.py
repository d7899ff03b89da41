"""Which type the activations between kernels have: a rule over a model's config and the card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from sdk.models.auto import model_type, own_model

#: Models that were trained in bfloat16 and use its range: float16 ends at 65,504, and the residual
#: stream of the smallest Gemma 3 reaches 104,061. Between its kernels the largest number seen was
#: 451, but larger models were not looked at.
WIDE_RANGE = frozenset({"gemma2", "gemma3_text"})


def activation_type(
    config: Mapping[str, Any],
    matrix: torch.dtype,
    *,
    exact: bool = False,
    stored: str = "",
    asked: str = "",
) -> torch.dtype:
    """See :attr:`sdk.kernels.ops.Ops.activations`, for the model that ``config`` describes.

    ``matrix``: what the device's matrix units multiply best
    (:func:`sdk.kernels.gpu.matrix_type`), float32 without such. A file that says float16 gets that,
    and so does one that says nothing and whose matrices are all ``stored`` as float16 (GGUF): their
    products round inputs to it in any case, and bfloat16 between them would cost a hundred times
    the accuracy (KL divergence 0.00017 of SmolLM2, 0.000002) and copies besides. Any other,
    whatever it was quantized from, gets what the card has. In place of float16, models of
    ``WIDE_RANGE`` get bfloat16 if the card has it, else float32. ``exact`` arithmetic and
    transformers' own code, which computes between our kernels, are float32. A user who ``asked``
    for float16 or bfloat16 is asked before the file is; bfloat16 on a card without it is float32.
    """
    name = model_type(config)
    if exact or matrix == torch.float32 or own_model(name) is None:
        return torch.float32
    if asked == "bfloat16":
        return torch.bfloat16 if matrix == torch.bfloat16 else torch.float32
    wanted = torch.float16 if (asked or _stated(config) or stored) == "float16" else matrix
    if wanted == torch.float16 and name in WIDE_RANGE:
        return torch.float32 if matrix == torch.float16 else matrix
    return wanted


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
