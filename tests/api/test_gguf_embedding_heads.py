"""GGUF files of EmbeddingGemma with the dense layers after pooling, if they were asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sdk import LLM, CheckpointError, UnsupportedError
from tests.gguf_models import BOOL, F32, U32, gguf_of, save_gguf
from tests.models.conftest import expected_states, tiny

OPTIONS: dict[str, Any] = {"compute": "exact", "num_threads": 1, "skip_tokenizer_init": True}
IDS = [[5, 17, 80, 3], list(range(3, 50)), [9]]


def dense(seed: int, rows: int, columns: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator) / columns**0.5


def gemma(path: Path, pooling: int | None, layers: dict[str, torch.Tensor]) -> Any:
    """A tiny EmbeddingGemma and its file."""
    options = {"use_bidirectional_attention": True, "sliding_window": 19}
    model = tiny("gemma3_text", **options, num_hidden_layers=7, query_pre_attn_scalar=16)
    window = model.config.to_dict()["sliding_window"]
    more: dict[str, Any] = {
        "attention.sliding_window": (U32, window),
        "rope.freq_base_swa": (F32, 10000.0),
        "attention.causal": (BOOL, False),
    }
    if pooling is not None:
        more["pooling_type"] = (U32, pooling)
    for name, weight in layers.items():
        more[f"{name}_feat_in"] = (U32, weight.shape[1])
        more[f"{name}_feat_out"] = (U32, weight.shape[0])
    file = gguf_of(model, more, arch="gemma-embedding")
    for name, weight in layers.items():
        data = weight.numpy().astype("<f4")
        file.tensors[f"{name}.weight"] = (data.shape[::-1], 0, data.tobytes())
    save_gguf(path, file)
    return model


@pytest.mark.parametrize("layers", [(), ("dense_2", "dense_3")])
def test_vectors_go_through_the_dense_layers(layers: tuple[str, ...], tmp_path: Path) -> None:
    two, three = dense(1, 40, 64), dense(2, 64, 40)
    given = {"dense_2": two, "dense_3": three} if layers else {}
    model = gemma(tmp_path / "m.gguf", 1, given)
    with LLM(tmp_path / "m.gguf", **OPTIONS) as llm:
        assert llm.load_warnings == ()
        found = llm.embed([{"prompt_token_ids": ids} for ids in IDS])
    for one, ids in zip(found, IDS, strict=True):
        wanted = expected_states(model, ids).mean(0)
        wanted = three @ (two @ wanted) if layers else wanted
        wanted = wanted / wanted.norm()
        assert np.allclose(one.embedding, wanted.numpy(), atol=1e-5)


def test_a_dense_layer_of_another_width_is_named(tmp_path: Path) -> None:
    gemma(tmp_path / "m.gguf", 1, {"dense_2": dense(1, 40, 64), "dense_3": dense(2, 64, 41)})
    with pytest.raises(CheckpointError, match=r"dense layer 2 .* matrix of 40 columns, found"):
        LLM(tmp_path / "m.gguf", **OPTIONS)


def test_dense_layers_without_a_pooling_are_refused_where_they_are_needed(tmp_path: Path) -> None:
    gemma(tmp_path / "m.gguf", None, {"dense_2": dense(1, 40, 64), "dense_3": dense(2, 64, 40)})
    with LLM(tmp_path / "m.gguf", **OPTIONS) as llm:
        [states] = llm.encode([{"prompt_token_ids": IDS[0]}], pooling="mean")
        assert states.outputs.data.shape == (64,)
        with pytest.raises(UnsupportedError, match=r"pooling_type: expected 1 .*found None"):
            llm.embed([{"prompt_token_ids": IDS[0]}])
