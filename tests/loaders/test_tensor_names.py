"""Names of tensors of models that do not use a Llama's, and the order of joined q, k and v."""

from __future__ import annotations

import pytest
import torch

from sdk.loaders.folders.tensor_names import TensorNames
from sdk.loaders.qkv_rows import our_rows, stored_rows

NAMES = {
    "model.layers": "transformer.h",
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "lm_head": "embed_out",
    "self_attn.qkv_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.down_proj": "mlp.c_proj",
}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("transformer.wte.weight", "model.embed_tokens.weight"),
        ("embed_out.weight", "lm_head.weight"),
        ("transformer.ln_f.bias", "model.norm.bias"),
        ("transformer.h.11.attn.c_attn.qweight", "model.layers.11.self_attn.qkv_proj.qweight"),
        ("transformer.h.0.attn.c_proj", "model.layers.0.self_attn.o_proj"),
        ("transformer.h.0.mlp.c_proj.bias", "model.layers.0.mlp.down_proj.bias"),
        ("transformer.h.0.attn.masked_bias", "model.layers.0.attn.masked_bias"),
        ("transformer.wtem.weight", "transformer.wtem.weight"),
        ("vision.h.0.attn.c_attn.weight", "vision.h.0.attn.c_attn.weight"),
    ],
)
def test_a_file_s_name_has_one_of_ours_and_back(theirs: str, ours: str) -> None:
    names = TensorNames(NAMES)
    assert names.ours(theirs) == ours
    assert names.theirs(ours) == theirs


def test_a_body_without_its_head_has_shorter_names() -> None:
    names = TensorNames(NAMES)
    assert names.ours("wte.weight") == "model.embed_tokens.weight"
    assert names.ours("h.3.attn.c_attn.bias") == "model.layers.3.self_attn.qkv_proj.bias"
    assert names.ours("ln_f.weight") == "model.norm.weight"


def test_rows_of_a_key_head_follow_one_another() -> None:
    """Two key heads of width 2 with two queries each: q0 q1 k v of each."""
    config = {"model_type": "falcon", "num_attention_heads": 4, "hidden_size": 8}
    config["num_key_value_heads"] = 2
    name = "model.layers.0.self_attn.qkv_proj"
    rows = stored_rows(config, name)
    assert rows is not None
    assert rows.tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]
    back = our_rows(config, f"{name}.bias")
    assert back is not None
    assert torch.equal(torch.arange(16)[rows][back], torch.arange(16))
    assert stored_rows(config, "model.layers.0.self_attn.o_proj") is None
    assert stored_rows({**config, "model_type": "llama"}, name) is None
