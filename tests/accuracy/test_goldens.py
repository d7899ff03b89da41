"""Checkpoints written by other programs give the logits other programs computed from them.

``golden.npz`` holds float32 logits of every prompt position (tests/golden/README.md says how they
were made). Exact arithmetic must reach them to 1e-4 of their norm; with activations rounded to 8
bits the bound is 0.04, the error llama.cpp makes on the same files (it measures 0.016 to 0.032).
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sdk.engine.kv_cache import KVCache, kv_spec
from sdk.kernels.batch import AttentionBatch
from sdk.kernels.ops import Compute, Ops
from sdk.loaders.open import open_checkpoint
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = [
    pytest.param(folder / path, id=f"{folder.name}/{path}")
    for folder in sorted(GOLDEN.iterdir())
    if folder.is_dir()
    for path in json.loads((folder / "origin.json").read_text())["paths"]
]


def logits_of(path: Path, prompt: Tensor, compute: Compute, chunk: int) -> Tensor:
    """Logits of every position, the prompt fed ``chunk`` tokens at a time."""
    checkpoint = open_checkpoint(path)
    ops = Ops(compute=compute, num_threads=2)
    model = build_model(checkpoint, Mesh(), ops, max_model_len=64)
    kv = KVCache(kv_spec(model.config, model.config.num_kv_heads, 16, "float32"), 8)
    rows = []
    with torch.inference_mode():
        for begin in range(0, len(prompt), chunk):
            end = min(begin + chunk, len(prompt))
            positions = torch.arange(begin, end)
            batch = AttentionBatch(
                positions=positions,
                query_start=torch.tensor([0, end - begin], dtype=torch.int32),
                context_len=torch.tensor([end], dtype=torch.int32),
                page_table=torch.tensor([[3, 5, 1, 2]], dtype=torch.int32),
                slots=torch.tensor(
                    [[3, 5, 1, 2][p // 16] * 16 + p % 16 for p in range(begin, end)]
                ),
                page_size=16,
                max_query_len=end - begin,
                max_context_len=end,
            )
            rows.append(model.logits(model(prompt[begin:end], batch, kv.layers)))
    assert checkpoint.unused() == []
    checkpoint.close()
    ops.close()
    return torch.cat(rows)


def _distance(found: Tensor, expected: Tensor) -> float:
    found = found - found.mean(-1, keepdim=True)
    expected = expected - expected.mean(-1, keepdim=True)
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("path", CASES)
@pytest.mark.parametrize(("compute", "bound"), [("exact", 1e-4), ("auto", 0.04)])
def test_logits_are_those_of_the_reference(path: Path, compute: Compute, bound: float) -> None:
    folder = path if (path / "golden.npz").exists() else path.parent
    with np.load(folder / "golden.npz") as golden:
        prompt = torch.from_numpy(golden["prompt"])
        expected = torch.from_numpy(golden["logits"])
    whole = logits_of(path, prompt, compute, len(prompt))
    assert _distance(whole, expected) < bound
    assert torch.equal(logits_of(path, prompt, compute, 7), whole)
