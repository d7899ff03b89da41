"""More ranks than a layer has key heads: the plan counts the copies of their weights."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

import sdk
from sdk.kernels.operators.ops import Ops
from sdk.loaders.open import open_checkpoint
from sdk.models.auto import build_model
from sdk.quant.errors import AlignmentError
from tests.gguf_models import gguf_of, save_gguf
from tests.models.conftest import Ranks, tiny
from tests.models.tiny_architectures import ARCHITECTURES


def _held(path: Path, ranks: int) -> int:
    """Bytes of the projections to queries, keys and values, of all ranks together."""

    def of_rank(mesh: Any) -> int:
        with contextlib.closing(Ops(compute="exact", num_threads=1)) as ops:
            model = build_model(open_checkpoint(path), mesh, ops, max_model_len=64)
            found = [own for name, own in model.linears() if name.endswith("qkv_proj")]
            return sum(own.weight.shape[0] * own.weight.shape[1] * 4 for own in found)

    return sum(Ranks(ranks).run(of_rank))


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *(("gemma4_text-experts", 2), ("gemma4_text-experts", 4)),
        *(("llama", 4), ("phi3", 4), ("file", 2)),
    ],
)
def test_a_plan_counts_keys_as_often_as_ranks_hold_them(
    name: str, ranks: int, tmp_path: Path
) -> None:
    """Gemma 4 26B has fewer key heads in the layers that see all tokens."""
    options = ARCHITECTURES.get(name, {"num_key_value_heads": 1})
    oracle = tiny("llama" if name == "file" else name.partition("-")[0], **options)
    path = tmp_path / "model"
    if name == "file":
        path = save_gguf(tmp_path / "m.gguf", gguf_of(oracle))
    else:
        oracle.save_pretrained(path)
    limits: dict[str, Any] = {"max_model_len": 64, "compute": "exact"}
    plans = [sdk.LLM.plan(path, tensor_parallel_size=n, **limits).weights for n in (1, ranks)]
    assert plans[1] - plans[0] == _held(path, ranks) - _held(path, 1) > 0


def test_ranks_that_cannot_share_the_key_heads_of_a_layer_are_refused_by_the_plan(
    tmp_path: Path,
) -> None:
    options = {
        **ARCHITECTURES["gemma4_text-experts"],
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "num_global_key_value_heads": 2,
    }
    tiny("gemma4_text", **options).save_pretrained(tmp_path)
    with pytest.raises(AlignmentError, match="cannot split 6 query and 2 key/value heads over 3 r"):
        sdk.LLM.plan(tmp_path, tensor_parallel_size=3)
