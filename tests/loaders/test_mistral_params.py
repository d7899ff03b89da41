"""Folders with Mistral's params.json and consolidated.safetensors hold the same model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sdk.loaders.open import open_checkpoint
from sdk.quant.errors import CheckpointError, UnsupportedError

PARAMS: dict[str, Any] = {
    "dim": 32, "n_layers": 1, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "hidden_dim": 64,
    "norm_eps": 1e-5, "vocab_size": 16, "rope_theta": 1e6, "max_seq_len": 4096,
}  # fmt: skip
#: Their names and ours, with shapes.
NAMES = {
    "tok_embeddings": ("model.embed_tokens", (16, 32)),
    "output": ("lm_head", (16, 32)),
    "layers.0.attention.wq": ("model.layers.0.self_attn.q_proj", (32, 32)),
    "layers.0.attention.wk": ("model.layers.0.self_attn.k_proj", (16, 32)),
    "layers.0.attention.wv": ("model.layers.0.self_attn.v_proj", (16, 32)),
    "layers.0.attention.wo": ("model.layers.0.self_attn.o_proj", (32, 32)),
    "layers.0.feed_forward.w1": ("model.layers.0.mlp.gate_proj", (64, 32)),
    "layers.0.feed_forward.w2": ("model.layers.0.mlp.down_proj", (32, 64)),
    "layers.0.feed_forward.w3": ("model.layers.0.mlp.up_proj", (64, 32)),
}
NORMS = {
    "norm": "model.norm",
    "layers.0.attention_norm": "model.layers.0.input_layernorm",
    "layers.0.ffn_norm": "model.layers.0.post_attention_layernorm",
}
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def folder(tensors: dict[str, Tensor], **changes: Any) -> Path:
        path = tmp_path / "model"
        path.mkdir()
        params = {key: value for key, value in {**PARAMS, **changes}.items() if value != "gone"}
        (path / "params.json").write_text(json.dumps(params))
        save_file(tensors, path / "consolidated.safetensors")
        return path

    return folder


def model() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(0)
    found = {f"{name}.weight": torch.randn(s, generator=random) for name, (_, s) in NAMES.items()}
    return found | {f"{name}.weight": torch.randn(32, generator=random) for name in NORMS}


def as_hugging_face(name: str, values: Tensor) -> Tensor:
    """Pairs of rows side by side become halves of a head."""
    heads = {"q_proj": 4, "k_proj": 2}.get(name.rpartition(".")[2])
    if heads is None:
        return values
    return values.view(heads, -1, 2, 32).transpose(1, 2).reshape(values.shape)


def test_every_tensor_is_found_and_its_rows_are_in_our_order(write: Write) -> None:
    tensors = model()
    checkpoint = open_checkpoint(write(tensors))
    for theirs, (ours, _) in NAMES.items():
        expected = as_hugging_face(ours, tensors[f"{theirs}.weight"])
        assert torch.equal(checkpoint.weight(ours).dequantize(), expected), ours
    for theirs, ours in NORMS.items():
        assert torch.equal(checkpoint.tensor(f"{ours}.weight"), tensors[f"{theirs}.weight"])
    assert checkpoint.unused() == []


def test_the_config_is_that_of_the_model(write: Write) -> None:
    config = open_checkpoint(write(model())).config
    expected = {
        "model_type": "mistral", "hidden_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "intermediate_size": 64, "rms_norm_eps": 1e-5, "vocab_size": 16,
        "max_position_embeddings": 4096, "sliding_window": None,
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    rope = config.get("rope_parameters") or config
    assert rope["rope_theta"] == 1e6


def test_8_bit_floats_have_a_scale_for_each_matrix(write: Write) -> None:
    tensors = model()
    name = "layers.0.attention.wq"
    small = tensors[f"{name}.weight"].to(torch.float8_e4m3fn)
    tensors |= {f"{name}.weight": small, f"{name}.qscale_weight": torch.tensor(0.5)}
    tensors[f"{name}.qscale_act"] = torch.tensor(2.0)
    path = write(tensors, quantization={"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"})
    weight = open_checkpoint(path).weight("model.layers.0.self_attn.q_proj")
    assert str(weight.spec) == "fp8"
    assert torch.equal(weight.dequantize(), as_hugging_face("a.q_proj", small.float() * 0.5))


def test_experts_are_those_of_mixtral(write: Write) -> None:
    tensors = model()
    for expert in range(3):
        for part in ("w1", "w2", "w3"):
            values = tensors[f"layers.0.feed_forward.{part}.weight"] + expert
            tensors[f"layers.0.feed_forward.experts.{expert}.{part}.weight"] = values
    tensors["layers.0.feed_forward.gate.weight"] = torch.ones(3, 32)
    path = write(tensors, moe={"num_experts": 3, "num_experts_per_tok": 2})
    checkpoint = open_checkpoint(path)
    assert checkpoint.config["model_type"] == "mixtral"
    assert checkpoint.config["num_local_experts"] == 3
    found = checkpoint.weight("model.layers.0.mlp.experts.2.up_proj").dequantize()
    assert torch.equal(found, tensors["layers.0.feed_forward.w3.weight"] + 2)
    assert checkpoint.weight("model.layers.0.mlp.gate").shape == (3, 32)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"dim": "gone"}, CheckpointError, "params.json: dim missing"),
        ({"dim": 0}, CheckpointError, "hidden_size is 0"),
        ({"n_kv_heads": 3}, CheckpointError, "4 attention heads are not a multiple of 3"),
        ({"yarn": {"factor": 16}}, UnsupportedError, "params.json: yarn: unknown or not supported"),
        ({"causal": False}, UnsupportedError, "causal: unknown or not supported"),
        ({"moe": {"num_experts": 3}}, UnsupportedError, "moe is .*, expected only num_experts and"),
        ({"moe": 3}, UnsupportedError, "moe is 3, expected"),
        ({"quantization": {"qformat_weight": "int4"}}, UnsupportedError, "qformat_weight of fp8"),
    ],
)
def test_params_that_are_not_run_are_refused(
    write: Write, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_checkpoint(write(model(), **changes))


def test_rows_that_are_no_pairs_in_every_head_are_refused(write: Write) -> None:
    tensors = model()
    tensors["layers.0.attention.wk.weight"] = torch.ones(14, 32)
    with pytest.raises(
        CheckpointError, match=r"wk.weight'.*expected shape \[16, 32\].*found \[14, 32\]"
    ):
        open_checkpoint(write(tensors)).weight("model.layers.0.self_attn.k_proj")
