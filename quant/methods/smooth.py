"""SmoothQuant: inputs that vary much between channels are evened out before both are rounded.

Xiao et al. (2022): with ``s[k] = max|x_k|^a / max|w_k|^(1 - a)`` the input is divided and the
weight multiplied; what is hard about the activations moves into the weights, which are easier.
``a = 0.8`` is what llm-compressor takes for Llama; the paper's own models had 0.5.
"""

from __future__ import annotations

import torch
from torch import Tensor

_STRENGTH = 0.8


def smoothing(weight: Tensor, largest: Tensor) -> Tensor:
    """``s`` float32 ``[K]`` for ``weight [N, K]`` and the largest ``|x|`` of each input channel."""
    columns = weight.abs().amax(0).clamp(min=1e-5)
    s = largest.clamp(min=1e-5).pow(_STRENGTH) / columns.pow(1 - _STRENGTH)
    return torch.where(largest > 0, s, 1.0).clamp(min=1e-5)
