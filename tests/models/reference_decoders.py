"""Parts of decoders that transformers has no class for, in torch, from their formulae."""

from __future__ import annotations

import torch
from torch import Tensor


def rotated(x: Tensor, theta: float, width: int | None = None) -> Tensor:
    """Heads ``[T, heads, d]`` whose first ``width`` dimensions (default: all) are rotated, i and
    i + width / 2 together."""
    width = width or x.shape[-1]
    half = width // 2
    angle = torch.arange(len(x)).float()[:, None, None]
    angle = angle * theta ** (-torch.arange(half).float() / half)
    first, second, rest = x.split([half, half, x.shape[-1] - width], -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Causal attention of ``[T, heads, d]``, ``[T, heads * d]``; a token sees ``window`` tokens,
    itself included."""
    q, k, v = (one.transpose(0, 1) for one in (q, k, v))
    k, v = (one.repeat_interleave(len(q) // len(k), 0) for one in (k, v))
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
