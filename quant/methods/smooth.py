"""SmoothQuant: evens out the channels of activations before both sides are quantized.

Xiao et al. (2022): the input is divided and the weight multiplied by
``s[k] = max|x_k|^a / max|w_k|^(1 - a)``. That moves the outliers of activations, which are hard to
quantize, into the weights, which are easier. llm-compressor uses ``a = 0.8`` for Llama; the paper
used 0.5.
"""

from __future__ import annotations

from sdk.kernels.lazy_torch import Tensor, torch

_STRENGTH = 0.8


def smoothing(weight: Tensor, largest: Tensor) -> Tensor:
    """``s``, float32 ``[K]``, for ``weight [N, K]`` and the largest ``|x|`` per channel ``[K]``."""
    columns = weight.abs().amax(0).clamp(min=1e-5)
    s = largest.clamp(min=1e-5).pow(_STRENGTH) / columns.pow(1 - _STRENGTH)
    return torch.where(largest > 0, s, 1.0).clamp(min=1e-5)
