"""How keys and values are written into pages and read back: the definition, in torch.

``kv/kv_types.py`` defines the codes of each type. Here is what happens before and after: heads that
are stored *mixed* are multiplied by the Hadamard matrix first.
"""

from __future__ import annotations

import math

from sdk.kernels.kv.kv_types import HALF_MAX, KVType
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.lazy_torch import Tensor, torch


def mixed(x: Tensor, also: int = 0) -> Tensor:
    """``x [..., d]`` times the orthonormal Hadamard matrix of the largest power of two that divides
    d and, if given, ``also``: the width of the key that has a latent value, or of that value.

    Dot products stay the same when both vectors are mixed, and mixing twice restores a vector.
    Without it a few large channels would set the int8 step of all others; mixing spreads them over
    all channels.
    """
    both = x.shape[-1] | also
    block = both & -both
    span = 1
    while span < block:
        pairs = x.reshape(*x.shape[:-1], -1, 2, span)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        span *= 2
    return x * (1.0 / math.sqrt(block))


def encode(
    x: Tensor, kind: KVType, groups: int, *, mix: bool, also: int = 0
) -> tuple[Tensor, Tensor | None]:
    """Float32 ``x [..., d]`` as elements of a page and scales ``[..., groups]``. ``also``: see
    :func:`mixed`.

    Values that become codes or are mixed saturate at ±``HALF_MAX``: inf would become NaN.
    """
    if mix or kind.scale:
        x = x.clamp(-HALF_MAX, HALF_MAX)
    return kind.encode(mixed(x, also) if mix else x, groups)


def page_floats(
    pages: KVPages, index: Tensor, value_dim: int | None = None
) -> tuple[Tensor, Tensor]:
    """Keys and values of these pages, float32 ``[n, kv_heads, page_size, head_dim]`` and the same
    with ``value_dim`` (default: the pages' own; latent pages have none)."""
    found = []
    sides = [(pages.k, pages.k_scale, pages.k_type), (pages.v, pages.v_scale, pages.v_type)]
    for x, scale, kind in sides[: 1 if pages.latent else 2]:
        codes, scales = x[index], None
        if scale is not None:
            groups = scale.shape[1] // x.shape[1]
            shape = (*codes.shape[:2], groups, pages.page_size)
            scales = scale[index].view(shape).transpose(2, 3)
        found.append(kind.decode(codes, scales))
    return found[0], found[0][..., :value_dim] if pages.latent else found[1]
