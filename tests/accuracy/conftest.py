"""Logits of a checkpoint, from the runner that serves it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from sdk.evaluating.logits import logits_of as all_logits
from sdk.kernels.context import Compute


def _logits_of(
    path: Path, prompt: Tensor, compute: Compute, chunk: int, kv_dtype: str = "float32"
) -> Tensor:
    """Float32 ``[len(prompt), vocab]``, the prompt fed ``chunk`` tokens at a time."""
    ids: list[int] = prompt.tolist()
    return all_logits(
        path, ids, step=chunk, compute=compute, kv_cache_dtype=kv_dtype, num_threads=2
    )


@pytest.fixture(scope="session")
def logits_of() -> Callable[..., Tensor]:
    """``logits_of(path, prompt, compute, chunk, kv_dtype="float32")``."""
    return _logits_of
