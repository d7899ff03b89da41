"""The kernels that text models have."""

from __future__ import annotations

from typing import Any

from sdk.kernels.backend import Backend


def plain_kernels(backend: Backend, op: str) -> list[Any]:
    """The implementations of ``op`` but for those that round their inputs to bfloat16: these are
    for towers alone (test_bf16.py)."""
    return [one for one in backend.implementations(op) if not one.name.endswith("_bf16")]
