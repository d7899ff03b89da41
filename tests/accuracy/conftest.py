"""Logits of a checkpoint, straight from the model: no engine, no sampling."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sdk.engine.key_centres import centre_keys
from sdk.engine.kv_cache import KVCache, kv_spec
from sdk.kernels.batch import AttentionBatch
from sdk.kernels.ops import Compute, Ops
from sdk.loaders.open import open_checkpoint
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh

PAGE = 16


def _logits_of(
    path: Path, prompt: Tensor, compute: Compute, chunk: int, kv_dtype: str = "float32"
) -> Tensor:
    """Float32 ``[len(prompt), vocab]``, the prompt fed ``chunk`` tokens at a time."""
    checkpoint = open_checkpoint(path)
    ops = Ops(compute=compute, num_threads=2)
    model = build_model(checkpoint, Mesh(), ops, max_model_len=512)
    assert checkpoint.unused() == []
    pages = -(-len(prompt) // PAGE)
    table = torch.arange(pages, 0, -1)  # last page first: the order must not matter
    kv = KVCache(kv_spec(model.config, model.config.num_kv_heads, PAGE, kv_dtype), pages + 1)
    centre_keys(kv, model)
    rows = []
    with torch.inference_mode():
        for begin in range(0, len(prompt), chunk):
            end = min(begin + chunk, len(prompt))
            positions = torch.arange(begin, end)
            batch = AttentionBatch(
                positions=positions,
                query_start=torch.tensor([0, end - begin], dtype=torch.int32),
                context_len=torch.tensor([end], dtype=torch.int32),
                page_table=table[None].to(torch.int32),
                slots=table[positions // PAGE] * PAGE + positions % PAGE,
                page_size=PAGE,
                max_query_len=end - begin,
                max_context_len=end,
            )
            rows.append(model.logits(model(prompt[begin:end], batch, kv.layers)))
    checkpoint.close()
    ops.close()
    return torch.cat(rows)


@pytest.fixture(scope="session")
def logits_of() -> Callable[..., Tensor]:
    """``logits_of(path, prompt, compute, chunk, kv_dtype="float32")``."""
    return _logits_of
