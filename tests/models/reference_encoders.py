"""Encoders that transformers has no class for, in torch, from the formulae of their papers and of
the code beside their weights. A model is a dict of tensors under the names of its files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, rms_norm, silu

State = dict[str, Tensor]
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "layer_norm_eps": 1e-5,
}


class Weights:
    """Tensors as modules: ``linear``, ``norm``."""

    def __init__(self, state: Mapping[str, Tensor], eps: float) -> None:
        self.state, self.eps = state, eps

    def linear(self, path: str, x: Tensor) -> Tensor:
        return linear(x, self.state[f"{path}.weight"], self.state.get(f"{path}.bias"))

    def norm(self, path: str, x: Tensor) -> Tensor:
        weight, bias = self.state[f"{path}.weight"], self.state[f"{path}.bias"]
        return layer_norm(x, x.shape[-1:], weight, bias, self.eps)


class Maker:
    """Seeded tensors whose products have the size of their inputs."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.state: State = {}

    def _noise(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def matrix(self, name: str, out: int, inputs: int) -> None:
        self.state[name] = self._noise(out, inputs) * (1.5 / inputs**0.5)

    def linear(self, path: str, out: int, inputs: int, *, bias: bool = True) -> None:
        self.matrix(f"{path}.weight", out, inputs)
        if bias:
            self.state[f"{path}.bias"] = 0.3 * self._noise(out)

    def norm(self, path: str, width: int) -> None:
        self.state[f"{path}.weight"] = 1 + 0.3 * self._noise(width)
        self.state[f"{path}.bias"] = 0.3 * self._noise(width)


def save(folder: Path, config: Mapping[str, Any], state: State) -> Path:
    """A model's folder, as it is published."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors")
    return folder


def _attend(q: Tensor, k: Tensor, v: Tensor, heads: int, bias: Tensor | float = 0.0) -> Tensor:
    """Attention both ways of ``[T, heads * d]``."""
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(0, 1) for x in (q, k, v))
    score = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5 + bias
    return (score.softmax(-1) @ v).transpose(0, 1).flatten(1)


# -- Jina Embeddings v2 --


def jina_config(*, code: bool = False, **options: Any) -> dict[str, Any]:
    name = "jina-bert-v2-qk-post-norm" if code else "jina-bert-implementation"
    return {
        **SIZES,
        "architectures": ["JinaBertForMaskedLM"],
        "auto_map": {"AutoModel": f"jinaai/{name}--modeling_bert.JinaBertModel"},
        "model_type": "bert",
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
        "emb_pooler": "mean",
        "hidden_act": "gelu",
        "attention_probs_dropout_prob": 0.0,
        "hidden_dropout_prob": 0.1,
        "type_vocab_size": 2,
        "pad_token_id": 0,
        **options,
    }


def jina_state(config: Mapping[str, Any], seed: int = 0) -> State:
    make, hidden, wide = Maker(seed), config["hidden_size"], config["intermediate_size"]
    code = "qk-post-norm" in str(config["auto_map"])
    make.matrix("embeddings.word_embeddings.weight", config["vocab_size"], hidden)
    make.matrix("embeddings.token_type_embeddings.weight", config["type_vocab_size"], hidden)
    make.norm("embeddings.LayerNorm", hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        for name in ("query", "key", "value"):
            make.linear(f"{layer}.attention.self.{name}", hidden, hidden)
        make.linear(f"{layer}.attention.output.dense", hidden, hidden)
        make.norm(f"{layer}.attention.output.LayerNorm", hidden)
        if code:
            for name in ("layer_norm_q", "layer_norm_k"):
                make.norm(f"{layer}.attention.self.{name}", hidden)
            for name in ("layer_norm_1", "layer_norm_2"):
                make.norm(f"{layer}.{name}", hidden)
        else:
            make.norm(f"{layer}.mlp.layernorm", hidden)
        up, down = ("up_gated_layer", "down_layer") if code else ("gated_layers", "wo")
        make.linear(f"{layer}.mlp.{up}", 2 * wide, hidden, bias=False)
        make.linear(f"{layer}.mlp.{down}", hidden, wide)
    return make.state


def _head_slopes(heads: int) -> list[float]:
    """The code's recursion: of the power of two below, and every second of the one above."""
    below = 2 ** math.floor(math.log2(heads))
    start = 2 ** (-(2 ** -(math.log2(below) - 3)))
    found = [start ** (i + 1) for i in range(below)]
    return found if below == heads else found + _head_slopes(2 * below)[::2][: heads - below]


def jina_states(config: Mapping[str, Any], state: State, ids: Sequence[int]) -> Tensor:
    """Hidden states ``[T, hidden]``."""
    w, heads = Weights(state, config["layer_norm_eps"]), config["num_attention_heads"]
    code = "qk-post-norm" in str(config["auto_map"])
    x = state["embeddings.word_embeddings.weight"][torch.tensor(ids)]
    x = w.norm("embeddings.LayerNorm", x + state["embeddings.token_type_embeddings.weight"][0])
    place = torch.arange(len(ids))
    distance = -(place[None] - place[:, None]).abs()
    bias = torch.tensor(_head_slopes(heads))[:, None, None] * distance
    act = torch.relu if config["feed_forward_type"] == "reglu" else gelu
    for i in range(config["num_hidden_layers"]):
        layer = f"encoder.layer.{i}"
        q, k, v = (w.linear(f"{layer}.attention.self.{n}", x) for n in ("query", "key", "value"))
        if code:
            q = w.norm(f"{layer}.attention.self.layer_norm_q", q)
            k = w.norm(f"{layer}.attention.self.layer_norm_k", k)
        y = w.linear(f"{layer}.attention.output.dense", _attend(q, k, v, heads, bias))
        y = w.norm(f"{layer}.attention.output.LayerNorm", y + x)
        if code:
            x = w.norm(f"{layer}.layer_norm_1", x + y)
            up, gate = w.linear(f"{layer}.mlp.up_gated_layer", x).chunk(2, -1)
            y = w.linear(f"{layer}.mlp.down_layer", up * act(gate))
            x = w.norm(f"{layer}.layer_norm_2", x + y)
        else:
            gate, up = w.linear(f"{layer}.mlp.gated_layers", y).chunk(2, -1)
            x = w.norm(f"{layer}.mlp.layernorm", w.linear(f"{layer}.mlp.wo", act(gate) * up) + y)
    return x


# -- nomic-embed-text-v2 --


def nomic_config(**options: Any) -> dict[str, Any]:
    renamed = {
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "layer_norm_eps": "layer_norm_epsilon",
    }
    sizes = {renamed.get(key, key): value for key, value in SIZES.items()}
    return {
        **sizes,
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "activation_function": "gelu",
        "causal": False,
        "expert_choice_router": False,
        "mlp_fc1_bias": True,
        "mlp_fc2_bias": True,
        "moe_every_n_layers": 2,
        "moe_impl": "megablocks",
        "moe_normalize_expert_weights": False,
        "moe_resid_pdrop": 0.0,
        "moe_top_k": 2,
        "num_experts": 4,
        "num_shared_experts": 0,
        "pad_token_id": 1,
        "prenorm": False,
        "qkv_proj_bias": True,
        "rotary_emb_base": 10000,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "type_vocab_size": 1,
        "use_rms_norm": None,
        **options,
    }


def nomic_state(config: Mapping[str, Any], seed: int = 0) -> State:
    make, hidden, wide = Maker(seed), config["n_embd"], config["n_inner"]
    make.matrix("embeddings.word_embeddings.weight", config["vocab_size"], hidden)
    make.matrix("embeddings.token_type_embeddings.weight", config["type_vocab_size"], hidden)
    make.norm("emb_ln", hidden)
    for i in range(config["n_layer"]):
        layer, experts = f"encoder.layers.{i}", config["num_experts"]
        make.linear(f"{layer}.attn.Wqkv", 3 * hidden, hidden)
        make.linear(f"{layer}.attn.out_proj", hidden, hidden)
        for name in ("norm1", "norm2"):
            make.norm(f"{layer}.{name}", hidden)
        if i % config["moe_every_n_layers"] == 1:
            make.linear(f"{layer}.mlp.router.layer", experts, hidden, bias=False)
            for name in ("w1", "w2"):
                make.matrix(f"{layer}.mlp.experts.mlp.{name}", experts * wide, hidden)
            make.linear(f"{layer}.mlp.experts", hidden, 1)
            del make.state[f"{layer}.mlp.experts.weight"]
        else:
            make.linear(f"{layer}.mlp.fc1", wide, hidden)
            make.linear(f"{layer}.mlp.fc2", hidden, wide)
    return make.state


def _rotated(x: Tensor, base: float) -> Tensor:
    """``[T, heads, d]``; dimensions i and i + d / 2 turn together."""
    half = x.shape[-1] // 2
    turns = base ** (-torch.arange(half).float() / half)
    angle = torch.arange(len(x)).float()[:, None, None] * turns
    first, second = x[..., :half], x[..., half:]
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _mixture(
    state: Mapping[str, Tensor], path: str, config: Mapping[str, Any], x: Tensor
) -> Tensor:
    """Every chosen expert's result times its share of the softmax over all, plus one bias."""
    shares = linear(x, state[f"{path}.router.layer.weight"]).softmax(-1)
    share, chosen = shares.topk(config["moe_top_k"])
    count = config["num_experts"]
    w1, w2 = (state[f"{path}.experts.mlp.{n}"].view(count, -1, x.shape[-1]) for n in ("w1", "w2"))
    y = state[f"{path}.experts.bias"].repeat(len(x), 1)
    for t, row in enumerate(x):
        for weight, one in zip(share[t], chosen[t].tolist(), strict=True):
            y[t] += weight * (gelu(w1[one] @ row) @ w2[one])
    return y


def nomic_states(config: Mapping[str, Any], state: State, ids: Sequence[int]) -> Tensor:
    """Hidden states ``[T, hidden]``."""
    w, heads = Weights(state, config["layer_norm_epsilon"]), config["n_head"]
    x = state["embeddings.word_embeddings.weight"][torch.tensor(ids)]
    x = w.norm("emb_ln", x + state["embeddings.token_type_embeddings.weight"][0])
    for i in range(config["n_layer"]):
        layer = f"encoder.layers.{i}"
        q, k, v = w.linear(f"{layer}.attn.Wqkv", x).chunk(3, -1)
        base = config["rotary_emb_base"]
        q, k = (_rotated(one.unflatten(-1, (heads, -1)), base).flatten(1) for one in (q, k))
        y = w.linear(f"{layer}.attn.out_proj", _attend(q, k, v, heads))
        x = w.norm(f"{layer}.norm1", x + y)
        if i % config["moe_every_n_layers"] == 1:
            y = _mixture(state, f"{layer}.mlp", config, x)
        else:
            y = w.linear(f"{layer}.mlp.fc2", gelu(w.linear(f"{layer}.mlp.fc1", x)))
        x = w.norm(f"{layer}.norm2", x + y)
    return x


# -- NeoBERT --


def neobert_config(**options: Any) -> dict[str, Any]:
    sizes = {key: value for key, value in SIZES.items() if key not in _NOT_OF_NEOBERT}
    return {
        **sizes,
        "architectures": ["NeoBERTLMHead"],
        "auto_map": {"AutoModel": "model.NeoBERT"},
        "decoder_init_range": 0.02,
        "dim_head": 16,
        "embedding_init_range": 0.02,
        "intermediate_size": 100,  # an MLP has 2/3 of it, and a multiple of 8: 72
        "kwargs": {"trust_remote_code": True},
        "max_length": 256,
        "model_type": "neobert",
        "norm_eps": 1e-5,
        "pad_token_id": 0,
        **options,
    }


_NOT_OF_NEOBERT = ("max_position_embeddings", "layer_norm_eps")


def neobert_width(config: Mapping[str, Any]) -> int:
    return 8 * math.ceil(int(2 * config["intermediate_size"] / 3) / 8)


def neobert_state(config: Mapping[str, Any], seed: int = 0) -> State:
    make, hidden, wide = Maker(seed), config["hidden_size"], neobert_width(config)
    make.matrix("model.encoder.weight", config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.transformer_encoder.{i}"
        make.linear(f"{layer}.qkv", 3 * hidden, hidden, bias=False)
        make.linear(f"{layer}.wo", hidden, hidden, bias=False)
        make.linear(f"{layer}.ffn.w12", 2 * wide, hidden, bias=False)
        make.linear(f"{layer}.ffn.w3", hidden, wide, bias=False)
        for name in ("attention_norm", "ffn_norm"):
            make.norm(f"{layer}.{name}", hidden)
    make.norm("model.layer_norm", hidden)
    make.linear("decoder", config["vocab_size"], hidden)
    rms = [name for name in make.state if name.endswith("norm.bias")]
    return {name: values for name, values in make.state.items() if name not in rms}


def _pairs_rotated(x: Tensor) -> Tensor:
    """``[T, heads, d]``; dimensions 2i and 2i + 1 turn together, as one complex number."""
    half = x.shape[-1] // 2
    turns = 10000.0 ** (-torch.arange(half).float() / half)
    angle = torch.arange(len(x)).float()[:, None, None] * turns
    number = torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous())
    return torch.view_as_real(number * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def neobert_states(config: Mapping[str, Any], state: State, ids: Sequence[int]) -> Tensor:
    """Hidden states ``[T, hidden]``."""
    w, heads = Weights(state, config["norm_eps"]), config["num_attention_heads"]

    def norm(path: str, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], state[f"{path}.weight"], config["norm_eps"])

    x = state["model.encoder.weight"][torch.tensor(ids)]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.transformer_encoder.{i}"
        joined = w.linear(f"{layer}.qkv", norm(f"{layer}.attention_norm", x))
        q, k, v = joined.unflatten(-1, (heads, -1)).chunk(3, -1)
        q, k = _pairs_rotated(q), _pairs_rotated(k)
        y = _attend(q.flatten(1), k.flatten(1), v.flatten(1), heads)
        x = x + w.linear(f"{layer}.wo", y)
        gate, up = w.linear(f"{layer}.ffn.w12", norm(f"{layer}.ffn_norm", x)).chunk(2, -1)
        x = x + w.linear(f"{layer}.ffn.w3", silu(gate) * up)
    return norm("model.layer_norm", x)
