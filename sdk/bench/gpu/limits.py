"""The card's limits; other rows are shares of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sdk.bench.gpu.card import Card
from sdk.bench.gpu.rows import Finding


def measure_limits(card: Card) -> Iterator[Finding]:
    """A copy of 2 GiB, counting bytes read and written, and a large product, of random data."""
    copy, gemm = _copy(card), _gemm(card)
    yield Finding("copy bandwidth", "", copy / 1e12, "TB/s", numbers={"copy": copy})
    yield Finding("bf16 product", "", gemm / 1e12, "TFLOP/s", numbers={"gemm": gemm})


def _copy(card: Card) -> float:
    source = card.normal(card.size(1 << 29, 1 << 16), dtype=torch.float32)
    target = torch.empty_like(source)
    return 2 * source.nbytes / card.time([lambda: target.copy_(source)])


def _gemm(card: Card) -> float:
    size = card.size(8192, 64)
    a, b = card.normal(size, size), card.normal(size, size)
    out = torch.empty_like(a)
    return 2 * size**3 / card.time([lambda: torch.mm(a, b, out=out)])
