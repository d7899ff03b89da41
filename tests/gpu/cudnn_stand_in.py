"""A CPU stand-in for torch's operator of cuDNN's attention."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

OPERATOR = "_scaled_dot_product_cudnn_attention"


class StandIn:
    """What the operator is documented to do, in float32. ``calls``: queries, keys and mask."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, bool]] = []
        self.error: Exception | None = None
        self.factor = 1.0
        self.dtype = torch.bfloat16

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Any, sums: bool, dropout: float = 0.0,
        causal: bool = False, mask: bool = False, *, scale: float | None = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        if self.error is not None:
            raise self.error
        assert bias is None and dropout == 0.0 and not mask and scale is not None
        assert q.dtype == k.dtype == v.dtype == self.dtype
        assert bool(k.isfinite().all()) and bool(v.isfinite().all())
        self.calls.append((q.shape[2], k.shape[2], causal))
        group = q.shape[1] // k.shape[1]
        keys, values = (x.float().repeat_interleave(group, 1) for x in (k, v))
        scores = q.float() @ keys.transpose(2, 3) * (scale * self.factor)
        if causal:  # aligned at the first query and key
            hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(hidden, -math.inf)
        found = scores.logsumexp(3, keepdim=True) if sums else torch.empty(0)
        none = torch.empty(0, dtype=torch.int64)
        result = (scores.softmax(3) @ values).to(q.dtype)
        return result, found, none, none, q.shape[2], k.shape[2], none, none, torch.empty(0)


@pytest.fixture
def library() -> Iterator[StandIn]:
    made = StandIn()
    registered = torch.library.Library("aten", "IMPL")
    registered.impl(OPERATOR, made, "CPU")
    yield made
    registered._destroy()
