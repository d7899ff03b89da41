"""The kernels that text models have, and the levels that are compared."""

from __future__ import annotations

from typing import Any

import pytest

from sdk.kernels.backend import Backend
from sdk.kernels.cpu import levels

#: The levels with a fused multiply-add, whose results have the same bits.
FUSED = tuple(level for level in levels() if level != "portable")
SEVERAL_FUSED = pytest.mark.skipif(
    len(FUSED) < 2, reason="the library has one such level: run `make build`"
)
SEVERAL_LEVELS = pytest.mark.skipif(
    len(levels()) < 2, reason="the library has one level: run `make build`"
)


def plain_kernels(backend: Backend, op: str) -> list[Any]:
    """The implementations of ``op`` but for those that round their inputs to bfloat16: these are
    for towers alone (test_bf16.py)."""
    return [one for one in backend.implementations(op) if not one.name.endswith("_bf16")]
