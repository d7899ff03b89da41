"""The centre of the keys, measured on a model at load."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk.engine.rank.key_centres import centre_keys
from sdk.engine.rank.kv_cache import KVCache, kv_spec
from sdk.kernels.operators.ops import Ops
from sdk.loaders.open import open_checkpoint
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh


@pytest.fixture(params=[1, 2])
def model(golden: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    checkpoint = open_checkpoint(golden / "gguf-Q8_0" / "model.gguf")
    ops = Ops(num_threads=request.param)
    yield build_model(checkpoint, Mesh(), ops, max_model_len=64)
    ops.close()
    checkpoint.close()


def cache_for(model: Any, dtype: str) -> KVCache:
    cache = KVCache(kv_spec(model.config, 32, dtype), 3)
    centre_keys(cache, model)
    return cache


def test_only_layers_with_keys_of_four_bits_get_a_centre(model: Any) -> None:
    for dtype, wanted in {
        "float16": [False, False],
        "k8v4": [False, False],
        "int4": [True, True],
        "k4v8": [True, True],
        "int4:skip=0": [False, True],
    }.items():
        found = [layer.k_centre is not None for layer in cache_for(model, dtype).layers]
        assert found == wanted, dtype


def test_a_centre_is_the_mean_of_the_heads_keys_and_the_same_every_time(model: Any) -> None:
    first, second = (cache_for(model, "int4").layers for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.k_centre is not None and b.k_centre is not None
        assert a.k_centre.shape == (model.config.num_kv_heads, model.config.head_dim)
        assert torch.equal(a.k_centre, b.k_centre) and a.k_centre.abs().max() > 0.01


def test_models_whose_scores_may_not_be_moved_get_none(model: Any) -> None:
    model.config = replace(model.config, attention_softcap=30.0)
    assert all(layer.k_centre is None for layer in cache_for(model, "int4").layers)
