"""How layers are pulled from a checkpoint: names, shapes, joined matrices, biases, tied ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sdk.kernels.operators.ops import Ops
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh
from sdk.quant.errors import CheckpointError
from sdk.quant.weight import StackedWeight
from tests.models.conftest import (
    DictCheckpoint,
    Paged,
    checkpoint_of,
    expected_logits,
    prompt,
    tiny,
)


def test_linears_are_named_by_their_path_and_bound(load: Callable[..., Any]) -> None:
    linears = dict(load(tiny("llama")).linears())
    kinds = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    expected = {f"model.layers.{i}.{kind}" for i in range(3) for kind in kinds} | {"lm_head"}
    assert set(linears) == expected
    assert all(linear.weight.choices() for linear in linears.values())
    assert linears["model.layers.0.self_attn.qkv_proj"].weight.shape == (64 + 2 * 32, 64)


def test_tied_ends_share_one_weight_and_leave_a_stored_head_unused(
    load: Callable[..., Any],
) -> None:
    checkpoint = checkpoint_of(tiny("llama", tie_word_embeddings=True))
    checkpoint.tensors["lm_head.weight"] = torch.zeros(96, 64)
    model = load(checkpoint)
    assert model.head.linear.weight is model.embedding.weight
    assert checkpoint.unused() == ["lm_head.weight"]


def test_parts_of_unlike_types_are_stacked_and_give_the_same_logits(
    load: Callable[..., Any],
) -> None:
    oracle = tiny("llama")
    for layer in oracle.model.layers:
        layer.self_attn.v_proj.weight.data = layer.self_attn.v_proj.weight.data.half().float()
    checkpoint = checkpoint_of(oracle)
    for name in checkpoint.tensors:
        if "v_proj" in name:
            checkpoint.tensors[name] = checkpoint.tensors[name].half()
    model = load(checkpoint)
    linears = dict(model.linears())
    assert isinstance(linears["model.layers.0.self_attn.qkv_proj"].weight, StackedWeight)
    ids = prompt(20, 1)
    assert (Paged(model).run("a", ids) - expected_logits(oracle, ids)).abs().max() <= 1e-4


def test_biases_no_config_mentions_are_taken_and_may_be_partial(load: Callable[..., Any]) -> None:
    """GGUF files of Llama shape may carry biases; here only k has one."""
    oracle = tiny("llama", attention_bias=True)
    checkpoint = checkpoint_of(oracle)
    checkpoint.config["attention_bias"] = False
    for layer, block in enumerate(oracle.model.layers):
        for name in ("q_proj", "v_proj", "o_proj"):
            getattr(block.self_attn, name).bias.data.zero_()
            del checkpoint.tensors[f"model.layers.{layer}.self_attn.{name}.bias"]
    ids = prompt(20, 2)
    found = Paged(load(checkpoint)).run("a", ids)
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4
    assert checkpoint.unused() == []


@pytest.mark.parametrize("root", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_gemma3_is_found(root: str, load: Callable[..., Any]) -> None:
    oracle = tiny("gemma3_text", sliding_window=8)
    text = checkpoint_of(oracle)
    tensors = {name.replace("model.", root, 1): t for name, t in text.tensors.items()}
    tensors["vision_tower.x.weight"] = torch.zeros(1)
    checkpoint = DictCheckpoint({"model_type": "gemma3", "text_config": text.config}, tensors)
    ids = prompt(20, 3)
    found = Paged(load(checkpoint)).run("a", ids)
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4
    assert checkpoint.unused() == ["vision_tower.x.weight"]


def test_a_config_given_beside_the_checkpoint_replaces_its_own(ops: Ops) -> None:
    checkpoint = checkpoint_of(tiny("llama"))
    changed = {**checkpoint.config, "num_hidden_layers": 2}
    model = build_model(checkpoint, Mesh(), ops, max_model_len=64, config=changed)
    assert model.config.num_layers == 2
    assert all(".layers.2." in name for name in checkpoint.unused())


def test_embeddings_can_be_given_instead_of_ids_and_stay_unchanged(
    load: Callable[..., Any],
) -> None:
    model = load(tiny("gemma2", sliding_window=8))
    ids = prompt(20, 4)
    embedded = model.embedding(torch.tensor(ids))
    before = embedded.clone()
    found = Paged(model).step({"a": embedded})["a"]
    assert torch.equal(found, Paged(model).run("a", ids))
    assert torch.equal(embedded, before)


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
    ],
)
def test_a_missing_or_misshapen_tensor_is_named(name: str, load: Callable[..., Any]) -> None:
    checkpoint = checkpoint_of(tiny("qwen2"))
    tensor = checkpoint.tensors.pop(name)
    with pytest.raises(CheckpointError, match=name.removesuffix(".weight")):
        load(checkpoint)
    checkpoint.tensors[name] = torch.cat((tensor, tensor))
    words = rf"{name.removesuffix('.weight')}.*expected shape \[{tensor.shape[0]}.*found \["
    with pytest.raises(CheckpointError, match=words):
        load(checkpoint)
