"""Selects the type of activations between kernels, from a model's config and the card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.kernels.lazy_torch import torch
from sdk.models.architecture import architecture
from sdk.models.auto import model_type


def activation_type(
    config: Mapping[str, Any],
    matrix: torch.dtype,
    *,
    exact: bool = False,
    stored: str = "",
    asked: str = "",
) -> torch.dtype:
    """See :attr:`sdk.kernels.operators.ops.Ops.activations`, for the model that ``config``
    describes.

    ``matrix``: the type that the device's matrix units multiply best
    (:func:`sdk.kernels.gpu.matrix_type`), float32 without such units. The rules, in order:

    - ``exact`` arithmetic and transformers' own code, which computes between our kernels: float32.
    - The user ``asked`` for float16 or bfloat16: that. bfloat16 on a card without it is float32.
    - The config states float16, or states nothing and all matrices are ``stored`` as float16
      (GGUF): float16. Their products convert inputs to it in any case; bfloat16 between them would
      cost a hundred times the accuracy (KL divergence 0.00017 of SmolLM2, 0.000002) and copies.
    - Anything else: the card's type, whatever the weights were quantized from.

    Where this gives float16, an architecture of ``wide_range`` gets bfloat16 if the card has it,
    else float32.
    """
    known = architecture(model_type(config))
    if exact or matrix == torch.float32 or known is None:
        return torch.float32
    if asked == "bfloat16":
        return torch.bfloat16 if matrix == torch.bfloat16 else torch.float32
    wanted = torch.float16 if (asked or _stated(config) or stored) == "float16" else matrix
    if wanted == torch.float16 and known.wide_range:
        return torch.float32 if matrix == torch.float16 else matrix
    return wanted


def _stated(config: Mapping[str, Any]) -> str:
    """The type the model was trained or saved in; a multimodal config states it in its text part.

    transformers writes ``dtype``, ``torch_dtype`` before version 5.
    """
    text = config.get("text_config")
    for values in (text if isinstance(text, Mapping) else {}, config):
        for key in ("dtype", "torch_dtype"):
            if values.get(key) is not None:
                return str(values[key]).removeprefix("torch.")
    return ""
