"""Tiny transformers models as GGUF files in float32, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sdk.loaders.folders.expert_names import spelled_as_ours
from sdk.loaders.folders.tensor_names import TensorNames
from sdk.models.architecture import architecture
from tests.loaders.conftest import GgufBytes

#: model_type -> general.architecture.
NAMES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "granite": "granite",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "gemma": "gemma",
    "smollm3": "smollm3",
    "exaone4": "exaone4",
    "glm": "chatglm",
    "glm4": "glm4",
    "ernie4_5": "ernie4_5",
    "seed_oss": "seed_oss",
    "qwen2_moe": "qwen2moe",
    "glm4_moe": "glm4moe",
    "dots1": "dots1",
    "minimax_m2": "minimax-m2",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone_moe": "exaone-moe",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "olmo": "olmo",
    "nemotron": "nemotron",
    "jais2": "jais2",
    "bitnet": "bitnet-b1.58",
    "arcee": "arcee",
    "apertus": "apertus",
    "stablelm": "stablelm",
    "phi": "phi2",
    "starcoder2": "starcoder2",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "mistral4": "mistral4",
    "minicpm3": "minicpm3",
    "youtu": "deepseek2",
}
#: The key of a config's eps, for models with LayerNorm.
_LAYER_NORM_EPS = {
    "command-r": "layer_norm_eps",
    "cohere2": "layer_norm_eps",
    "olmo": None,  # fixed
    "nemotron": "norm_eps",
    "jais2": "layer_norm_eps",
    "stablelm": "layer_norm_eps",
    "phi2": "layer_norm_eps",
    "starcoder2": "norm_epsilon",
    "orion": "layer_norm_eps",
    "dbrx": None,
    "codeshell": "norm_epsilon",
}
#: Where transformers turns dimensions i and i + d / 2 of a head, and llama.cpp 2i and 2i + 1.
_PERMUTED = (
    *("llama", "granite", "granite_swa", "smollm3", "mistral3", "internlm2", "xverse", "minicpm"),
    *("olmo", "arcee", "muse-glimmer", "granitemoe", "llama-embed", "baichuan", "bailingmoe"),
    "maincoder",
)
LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks",
    "self_attn.attn_sub_norm": "attn_sub_norm",
    "mlp.ffn_sub_norm": "ffn_sub_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "self_attn.gate_proj": "attn_gate",
    "self_attn.g_proj": "attn_gate",
    "shared_mlp.output_linear": "ffn_down",
    "self_attn.query_layernorm": "attn_q_norm",
    "self_attn.key_layernorm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction": "exp_probs_b",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "self_attn.dense": "attn_output",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_NORMS_AFTER = {"post_attention_layernorm": "post_attention_norm"}
_SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
#: Names of norms that differ from a Llama's.
_NORMS = {
    "gemma2": _SANDWICH,
    "gemma3": _SANDWICH,
    "muse-glimmer": _SANDWICH,
    "gemma-embedding": _SANDWICH,
    "olmo2": {**_SANDWICH, **_NORMS_AFTER},
    "exaone4": {**_SANDWICH, **_NORMS_AFTER},
    "glm4": {
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
    "seed_oss": _NORMS_AFTER,
    "dbrx": {"post_attention_layernorm": "attn_output_norm"},
    "glm4moe": _NORMS_AFTER,
    "apertus": {"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
}
_TOP = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.final_layernorm": "output_norm",
    "lm_head": "output",
}
#: Codes of metadata types: see GgufBytes.
U32, I32, F32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


def gguf_of(
    model: Any, metadata: Mapping[str, tuple[int, Any]] | None = None, arch: str | None = None
) -> GgufBytes:
    """The file of a model; ``metadata``: more keys, without the architecture's name.

    ``arch``: another name that the file gives the architecture.
    """
    c = model.config
    arch = arch or NAMES[c.model_type]
    width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    base = c.rope_parameters
    theta = (base.get("full_attention") or base)["rope_theta"]
    facts: dict[str, tuple[int, Any]] = {
        "block_count": (U32, c.num_hidden_layers),
        "context_length": (U32, c.max_position_embeddings),
        "embedding_length": (U32, c.hidden_size),
        "feed_forward_length": (U32, getattr(c, "intermediate_size", 0)),
        "attention.head_count": (U32, c.num_attention_heads),
        "attention.head_count_kv": (U32, c.num_key_value_heads),
        "attention.key_length": (U32, width),
        "attention.value_length": (U32, width),
        **_eps(c, arch),
        "rope.freq_base": (F32, theta),
    }
    file = GgufBytes({"general.architecture": (STRING, arch)})
    for key, value in {**facts, **(metadata or {})}.items():
        file.metadata[f"{arch}.{key}"] = value
    for name, rows in _tensors(model):
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        stem, _, suffix = (f"{name}.weight" if name.endswith("sinks") else name).rpartition(".")
        if "layernorm" in name or name.endswith(("model.norm.weight", "_norm.weight")):
            minus_one = arch.startswith("gemma") or arch == "nemotron"
            # Muse Glimmer's other norms are whole.
            minus_one = minus_one or (arch == "muse-glimmer" and "layernorm" in name)
            rows = rows + 1.0 if minus_one and suffix == "weight" else rows
        if ".act_fn." in name:  # numbers of all layers, in the metadata
            key = f"xielu.{suffix}"
            _, (_, before) = file.metadata.get(key, (ARRAY, (F32, [])))
            file.metadata[key] = (ARRAY, (F32, [*before, float(rows)]))
            continue
        if stem.endswith(".norms.0"):  # of each head, stacked
            own = name.removesuffix(".norms.0.weight")
            state = model.state_dict()
            count = sum(other.startswith(f"{own}.norms.") for other in state)
            rows = torch.stack([state[f"{own}.norms.{i}.weight"].float() for i in range(count)])
            stem = own
        elif ".norms." in stem:
            continue
        heads = {"q_proj": c.num_attention_heads, "k_proj": c.num_key_value_heads}
        if arch == "maincoder":  # norms of heads that turn in adjacent pairs
            heads |= {"query_layernorm": 1, "key_layernorm": 1}
        part = stem.rpartition(".")[2]
        if arch in _PERMUTED and part in heads:
            pairs = rows.reshape(heads[part], 2, width // 2, -1)
            rows = pairs.transpose(1, 2).reshape(rows.shape)
        if part == "kv_b_proj" and "attention.key_length_mla" in (metadata or {}):
            each = rows.view(c.num_attention_heads, -1, c.kv_lora_rank)
            keys, values = each.split((c.qk_nope_head_dim, c.v_head_dim), dim=1)
            split = ((stem.replace("kv_b", "k_b"), keys.mT), (stem.replace("kv_b", "v_b"), values))
        else:
            split = tuple(_split(stem, rows))
        for own, part in split:
            data = np.ascontiguousarray(part.numpy(), "<f4")
            file.tensors[_name(own, arch) + f".{suffix}"] = (data.shape[::-1], 0, data.tobytes())
    return file


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """A model's tensors by our names; of experts, gate and up apart."""
    own = architecture(model.config.model_type)
    dense = getattr(model.config, "num_local_experts", None) == 0  # some sizes of Granite 4
    mixture = own is not None and own.config.expert_width is not None and not dense
    if own is not None and own.tensors.experts_by_rows:
        yield from _by_rows(model, own.tensors.names)
        return
    for name, values in model.state_dict().items():
        name, values = spelled_as_ours(name) if mixture else name, values.float()
        if name.endswith("experts.gate_up_proj"):
            half = values.shape[1] // 2
            for part, rows in (("gate", values[:, :half]), ("up", values[:, half:])):
                yield name.replace("gate_up", part) + ".weight", rows
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", values
        elif name.endswith("e_score_correction_bias"):
            yield name.replace("_bias", ".bias"), values.flatten()
        else:  # the converter leaves out dimensions of one
            yield name, values.squeeze(0) if name.endswith("expert_gate.weight") else values


def _by_rows(model: Any, names: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Those of DBRX, whose experts have the rows of one after the other."""
    ours, count = TensorNames(names).ours, model.config.ffn_config.moe_num_experts
    for name, values in model.state_dict().items():
        own, values = ours(name), values.float()
        if ".mlp.experts." not in own:
            yield own, values
            continue
        each = values.view(count, -1, values.shape[1])
        yield f"{own}.weight", each.transpose(1, 2) if own.endswith("down_proj") else each


def _split(stem: str, rows: Any) -> list[tuple[str, Any]]:
    """The parts of a matrix that the converter divides: gate and up of Granite's shared MLPs."""
    for whole, own in (
        ("shared_mlp.input_linear", "mlp."),
        ("mlp.shared_experts.gate_up_proj", "mlp.shared_experts."),
    ):
        path, found, _ = stem.partition(whole)
        if found:
            gate, up = rows.chunk(2)
            return [(f"{path}{own}gate_proj", gate), (f"{path}{own}up_proj", up)]
    return [(stem, rows)]


def _eps(config: Any, arch: str) -> dict[str, tuple[int, Any]]:
    if arch in _LAYER_NORM_EPS:
        key = _LAYER_NORM_EPS[arch]
        eps = 1e-5 if key is None else getattr(config, key)
        return {"attention.layer_norm_epsilon": (F32, eps)}
    return {"attention.layer_norm_rms_epsilon": (F32, config.rms_norm_eps)}


def _name(stem: str, arch: str) -> str:
    if stem in _TOP:
        return _TOP[stem]
    _, _, layer, own = stem.split(".", 3)
    return f"blk.{layer}.{_NORMS.get(arch, {}).get(own) or LAYER[own]}"


def save_gguf(path: Path, file: GgufBytes) -> Path:
    path.write_bytes(file.build())
    return path
