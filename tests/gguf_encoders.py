"""Tiny transformers encoders as GGUF files in float32, as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.gguf_models import BOOL, F32, STRING, U32
from tests.loaders.conftest import GgufBytes

#: Names in transformers' state dict -> names in the file; those of layers without their number.
_BERT = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_DISTILBERT = {
    **_BERT,
    "attention.q_lin": "attn_q",
    "attention.k_lin": "attn_k",
    "attention.v_lin": "attn_v",
    "attention.out_lin": "attn_output",
    "sa_layer_norm": "attn_output_norm",
    "ffn.lin1": "ffn_up",
    "ffn.lin2": "ffn_down",
    "output_layer_norm": "layer_output_norm",
}
_LLAMA = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_NOMIC = {
    **_BERT,
    **_LLAMA,
    "post_attention_layernorm": "attn_output_norm",
    "post_mlp_layernorm": "layer_output_norm",
}
_JINA_V3 = {**_NOMIC, "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
_MODERN = {
    "embeddings.tok_embeddings": "token_embd",
    "embeddings.norm": "token_embd_norm",
    "final_norm": "output_norm",
    "attn_norm": "attn_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.Wo": "attn_output",
    "mlp_norm": "ffn_norm",
    "mlp.Wi": "ffn_up",
    "mlp.Wo": "ffn_down",
}
_EURO = {
    **_LLAMA,
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
#: model_type -> the file's architecture and its names.
FILES: dict[str, tuple[str, dict[str, str]]] = {
    "bert": ("bert", _BERT),
    "roberta": ("bert", _BERT),
    "xlm-roberta": ("bert", _BERT),
    "distilbert": ("bert", _DISTILBERT),
    "nomic_bert": ("nomic-bert", _NOMIC),
    "jina_embeddings_v3": ("jina-bert-v3", _JINA_V3),
    "modernbert": ("modern-bert", _MODERN),
    "eurobert": ("eurobert", _EURO),
}
_LAYER = re.compile(r"(?:encoder\.|transformer\.)?layers?\.(\d+)\.(.+)")


def gguf_of_encoder(model: Any) -> GgufBytes:
    """The file of a model; the head of another task is left out."""
    c = model.config
    arch, names = FILES[c.model_type]
    offset = c.pad_token_id + 1 if "roberta" in c.model_type else 0
    rms = arch == "eurobert"
    eps = getattr(c, "layer_norm_eps", getattr(c, "norm_eps", getattr(c, "rms_norm_eps", 1e-12)))
    facts: dict[str, tuple[int, Any]] = {
        "block_count": (U32, c.num_hidden_layers),
        "context_length": (U32, c.max_position_embeddings - offset),
        "embedding_length": (U32, c.hidden_size),
        "feed_forward_length": (U32, getattr(c, "intermediate_size", None) or c.hidden_dim),
        "attention.head_count": (U32, c.num_attention_heads),
        "attention.head_count_kv": (
            U32,
            getattr(c, "num_key_value_heads", None) or c.num_attention_heads,
        ),
        f"attention.layer_norm_{'rms_' if rms else ''}epsilon": (F32, eps),
        "attention.causal": (BOOL, False),
        "pooling_type": (U32, 1),
    }
    ropes = getattr(c, "rope_parameters", None) or {}
    full = ropes.get("full_attention", ropes)
    if "rope_theta" in full:
        facts["rope.freq_base"] = (F32, full["rope_theta"])
    if arch == "modern-bert":
        facts["rope.freq_base_swa"] = (F32, ropes["sliding_attention"]["rope_theta"])
        facts["attention.sliding_window"] = (U32, c.local_attention)
        facts["attention.sliding_window_pattern"] = (U32, 3)
    file = GgufBytes({"general.architecture": (STRING, arch)})
    for key, value in facts.items():
        file.metadata[f"{arch}.{key}"] = value
    for name, values in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        layer = _LAYER.fullmatch(stem)
        own = names.get(stem if layer is None else layer[2])
        if own is None:
            continue
        rows = values.float()
        if own == "position_embd":
            rows = rows[offset:]
        data = np.ascontiguousarray(rows.numpy(), "<f4")
        place = own if layer is None else f"blk.{layer[1]}.{own}"
        file.tensors[f"{place}.{suffix}"] = (data.shape[::-1], 0, data.tobytes())
    return file


#: Names of tests/models/reference_encoders.py.
_JINA = {
    **_BERT,
    "attention.self.layer_norm_q": "attn_q_norm",
    "attention.self.layer_norm_k": "attn_k_norm",
    "layer_norm_1": "attn_norm_2",
    "layer_norm_2": "layer_output_norm",
    "mlp.layernorm": "layer_output_norm",
    "mlp.gated_layers": "ffn_up",
    "mlp.up_gated_layer": "ffn_up",
    "mlp.wo": "ffn_down",
    "mlp.down_layer": "ffn_down",
}
_NOMIC_MOE = {
    **_BERT,
    "emb_ln": "token_embd_norm",
    "attn.Wqkv": "attn_qkv",
    "attn.out_proj": "attn_output",
    "norm1": "attn_output_norm",
    "norm2": "layer_output_norm",
    "mlp.fc1": "ffn_up",
    "mlp.fc2": "ffn_down",
    "mlp.router.layer": "ffn_gate_inp",
    "mlp.experts.mlp.w1": "ffn_up_exps",
    "mlp.experts.mlp.w2": "ffn_down_exps",
}


def gguf_of_reference(
    config: dict[str, Any], state: dict[str, Any], *, apart: bool = False
) -> GgufBytes:
    """The file of a model of tests/models/reference_encoders.py. ``apart``: with one tensor for the
    gate of an MLP and one for the rest, as older converters write them."""
    experts = config.get("num_experts", 0)
    arch, names = ("nomic-bert-moe", _NOMIC_MOE) if experts else ("jina-bert-v2", _JINA)
    sizes = {**config, **{ours: config[theirs] for ours, theirs in _GPT2.items() if experts}}
    facts: dict[str, tuple[int, Any]] = {
        "block_count": (U32, sizes["num_hidden_layers"]),
        "context_length": (U32, sizes["max_position_embeddings"]),
        "embedding_length": (U32, sizes["hidden_size"]),
        "feed_forward_length": (U32, sizes["intermediate_size"]),
        "attention.head_count": (U32, sizes["num_attention_heads"]),
        "attention.layer_norm_epsilon": (F32, sizes["layer_norm_eps"]),
        "attention.causal": (BOOL, False),
        "pooling_type": (U32, 1),
    }
    if experts:
        facts["expert_count"] = (U32, experts)
        facts["expert_used_count"] = (U32, config["moe_top_k"])
        facts["moe_every_n_layers"] = (U32, config["moe_every_n_layers"])
        facts["rope.freq_base"] = (F32, float(config["rotary_emb_base"]))
    file = GgufBytes({"general.architecture": (STRING, arch)})
    for key, value in facts.items():
        file.metadata[f"{arch}.{key}"] = value
    for name, values in state.items():
        stem, suffix = name, "weight"
        if name.endswith((".weight", ".bias")):
            stem, _, suffix = name.rpartition(".")
        layer = re.fullmatch(r"encoder\.layers?\.(\d+)\.(.+)", stem)
        own = names.get(stem if layer is None else layer[2])
        if own is None:
            continue
        place = own if layer is None else f"blk.{layer[1]}.{own}"
        if own.endswith("_exps"):
            values = values.view(experts, -1, values.shape[1])
            values = values.transpose(1, 2) if "down" in own else values
        parts = {place: values}
        if apart and stem.endswith("gated_layers"):
            gate, up = values.chunk(2)
            parts = {place.replace("up", "gate"): gate, place: up}
        elif apart and stem.endswith("up_gated_layer"):
            up, gate = values.chunk(2)
            parts = {place.replace("up", "gate"): gate, place: up}
        for at, rows in parts.items():
            data = np.ascontiguousarray(rows.numpy(), "<f4")
            file.tensors[f"{at}.{suffix}"] = (data.shape[::-1], 0, data.tobytes())
    return file


_GPT2 = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}


_T5 = {
    "layer.0.SelfAttention.q": "attn_q",
    "layer.0.SelfAttention.k": "attn_k",
    "layer.0.SelfAttention.v": "attn_v",
    "layer.0.SelfAttention.o": "attn_o",
    "layer.0.SelfAttention.relative_attention_bias": "attn_rel_b",
    "layer.0.layer_norm": "attn_norm",
    "layer.1.DenseReluDense.wi": "ffn_up",
    "layer.1.DenseReluDense.wi_0": "ffn_gate",
    "layer.1.DenseReluDense.wi_1": "ffn_up",
    "layer.1.DenseReluDense.wo": "ffn_down",
    "layer.1.layer_norm": "ffn_norm",
}
_T5_DECODER = {
    **{name: own for name, own in _T5.items() if name.startswith("layer.0")},
    **{name.replace("layer.1", "layer.2"): own for name, own in _T5.items() if "layer.1" in name},
    **{f"layer.1.EncDecAttention.{part}": f"cross_attn_{part}" for part in "qkvo"},
    "layer.1.layer_norm": "cross_attn_norm",
}


def gguf_of_t5(model: Any) -> GgufBytes:
    """The file of an encoder of T5 or UMT5, or of a whole one."""
    c = model.config
    whole_model = hasattr(model, "decoder")
    arch = "t5" if whole_model else "t5encoder"
    facts: dict[str, tuple[int, Any]] = {
        "context_length": (U32, 512),
        "embedding_length": (U32, c.d_model),
        "feed_forward_length": (U32, c.d_ff),
        "block_count": (U32, c.num_layers),
        "attention.head_count": (U32, c.num_heads),
        "attention.key_length": (U32, c.d_kv),
        "attention.value_length": (U32, c.d_kv),
        "attention.layer_norm_epsilon": (F32, c.layer_norm_epsilon),
        "attention.relative_buckets_count": (U32, c.relative_attention_num_buckets),
        "attention.layer_norm_rms_epsilon": (F32, c.layer_norm_epsilon),
    }
    if whole_model:
        facts["decoder_block_count"] = (U32, c.num_decoder_layers)
        facts["decoder_start_token_id"] = (U32, 1)
    file = GgufBytes({"general.architecture": (STRING, arch)})
    for key, value in facts.items():
        file.metadata[f"{arch}.{key}"] = value
    whole = {
        "shared": "token_embd",
        "encoder.final_layer_norm": "enc.output_norm",
        "decoder.final_layer_norm": "dec.output_norm",
    }
    for name, values in model.state_dict().items():
        stem = name.removesuffix(".weight")
        layer = re.fullmatch(r"(enc|dec)oder\.block\.(\d+)\.(.+)", stem)
        place = whole.get(stem)
        if layer is not None:
            own = _T5_DECODER if layer[1] == "dec" else _T5
            place = f"{layer[1]}.blk.{layer[2]}.{own[layer[3]]}"
        if place is not None:  # else the embedding once more
            data = np.ascontiguousarray(values.float().numpy(), "<f4")
            file.tensors[f"{place}.weight"] = (data.shape[::-1], 0, data.tobytes())
    return file


_NEOBERT = {
    "qkv": "attn_qkv",
    "wo": "attn_output",
    "ffn.w12": "ffn_up",
    "ffn.w3": "ffn_down",
    "attention_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
}


def gguf_of_neobert(config: dict[str, Any], state: dict[str, Any]) -> GgufBytes:
    """The file of a NeoBERT of tests/models/reference_encoders.py: rows of q, k and v by head, as
    the converter leaves them."""
    width = state["model.transformer_encoder.0.ffn.w3.weight"].shape[1]
    facts: dict[str, tuple[int, Any]] = {
        "block_count": (U32, config["num_hidden_layers"]),
        "context_length": (U32, config["max_length"]),
        "embedding_length": (U32, config["hidden_size"]),
        "feed_forward_length": (U32, width),
        "attention.head_count": (U32, config["num_attention_heads"]),
        "attention.layer_norm_rms_epsilon": (F32, config["norm_eps"]),
        "attention.causal": (BOOL, False),
        "rope.freq_base": (F32, 10000.0),
        "rope.scaling.type": (STRING, "none"),
        "pooling_type": (U32, 2),
    }
    file = GgufBytes({"general.architecture": (STRING, "neo-bert")})
    for key, value in facts.items():
        file.metadata[f"neo-bert.{key}"] = value
    whole = {"model.encoder": "token_embd", "model.layer_norm": "enc.output_norm"}
    for name, values in state.items():
        stem = name.removesuffix(".weight")
        layer = re.fullmatch(r"model\.transformer_encoder\.(\d+)\.(.+)", stem)
        place = whole.get(stem) if layer is None else f"blk.{layer[1]}.{_NEOBERT[layer[2]]}"
        if place is not None:
            data = np.ascontiguousarray(values.numpy(), "<f4")
            file.tensors[f"{place}.weight"] = (data.shape[::-1], 0, data.tobytes())
    return file
