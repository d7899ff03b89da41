"""Tiny transformers models with recurrent layers as GGUF files in float32.

What llama.cpp's converter does to their tensors is written down here once more, from its code
(conversion/lfm2.py, qwen.py, mamba.py, granite.py, nemotron.py, falcon_h1.py, jamba.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.gguf_models import ARRAY, BOOL, F32, I32, STRING, U32
from tests.loaders.conftest import GgufBytes

Facts = dict[str, tuple[int, Any]]

#: Beginnings of names of a folder, and of the file's.
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "mixer.q_proj": "attn_q",
    "mixer.k_proj": "attn_k",
    "mixer.v_proj": "attn_v",
    "mixer.o_proj": "attn_output",
    "operator_norm": "attn_norm",
    "input_layernorm": "attn_norm",
    "norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "pre_ff_layernorm": "ffn_norm",
    "post_attention_layernorm": "ffn_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "conv.conv": "shortconv.conv",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.in_proj_ba": "ssm_ba",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
    "feed_forward.gate": "ffn_gate_inp",
    "feed_forward.router": "ffn_gate_inp",
    "feed_forward.experts.down_proj": "ffn_down_exps",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "block_sparse_moe.experts.down_proj": "ffn_down_exps",
    "mixer.gate": "ffn_gate_inp",
    "mixer.gate.e_score_correction": "exp_probs_b",
    "mixer.experts.up_proj": "ffn_up_exps",
    "mixer.experts.down_proj": "ffn_down_exps",
    "mixer.fc1_latent_proj": "ffn_latent_down",
    "mixer.fc2_latent_proj": "ffn_latent_up",
    **{
        f"{mlp}.{part}_proj": f"ffn_{part}"
        for mlp in ("mlp", "mixer", "feed_forward")
        for part in ("gate", "up", "down")
    },
    **{
        f"{mlp}.{part}_proj": f"ffn_{part}_shexp"
        for mlp in ("mlp.shared_expert", "mixer.shared_experts")
        for part in ("gate", "up", "down")
    },
    **{
        f"{mixer}.{name}": part
        for mixer in ("mamba", "mixer", "linear_attn")
        for name, part in {
            "in_proj": "ssm_in",
            "conv1d": "ssm_conv1d",
            "dt": "ssm_dt",
            "norm": "ssm_norm",
            "out_proj": "ssm_out",
            "x_proj": "ssm_x",
            "dt_proj": "ssm_dt",
            "dt_layernorm": "ssm_dt_norm",
            "b_layernorm": "ssm_b_norm",
            "c_layernorm": "ssm_c_norm",
        }.items()
    },
}
_TOP = {
    "embed_tokens.weight": "token_embd.weight",
    "embeddings.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "norm_f.weight": "output_norm.weight",
    "final_layernorm.weight": "output_norm.weight",
    "embedding_norm.weight": "token_embd_norm.weight",
}


def hybrid_gguf(model: Any, arch: str, facts: Facts) -> GgufBytes:
    """The file of a model; ``facts``: metadata without the name of the architecture."""
    c = model.config
    eps = next(
        getattr(c, k) for k in ("rms_norm_eps", "norm_eps", "layer_norm_epsilon") if hasattr(c, k)
    )
    eps_key = "layer_norm_epsilon" if arch.startswith("nemotron") else "layer_norm_rms_epsilon"
    file = GgufBytes({"general.architecture": (STRING, arch)})
    common: Facts = {
        "block_count": (U32, c.num_hidden_layers),
        "context_length": (U32, 256),
        "embedding_length": (U32, c.hidden_size),
        f"attention.{eps_key}": (F32, eps),
        "vocab_size": (U32, c.vocab_size),
    }
    if arch not in ("mamba", "mamba2"):
        width = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        common["attention.key_length"] = common["attention.value_length"] = (U32, width)
        common["attention.head_count"] = (U32, c.num_attention_heads)
    for key, value in {**common, **facts}.items():
        file.metadata[f"{arch}.{key}"] = value
    for name, values in model.state_dict().items():
        if name == "lm_head.weight" and c.tie_word_embeddings:
            continue
        for theirs, tensor in _written(name, values.float(), c, arch):
            data = np.ascontiguousarray(tensor.numpy(), "<f4")
            file.tensors[theirs] = (data.shape[::-1], 0, data.tobytes())
    return file


def layers(kinds: list[str], value: int, having: str) -> tuple[int, Any]:
    """An array with a value for each layer of one kind, and 0 for the others."""
    return ARRAY, (I32, [value if kind == having else 0 for kind in kinds])


def flags(kinds: list[str], having: str) -> tuple[int, Any]:
    return ARRAY, (BOOL, [kind == having for kind in kinds])


def _written(name: str, values: Tensor, c: Any, arch: str) -> Iterator[tuple[str, Tensor]]:
    if name == "lm_head.weight":
        yield "output.weight", values * getattr(c, "lm_head_multiplier", 1.0)
        return
    inside = name.partition(".")[2]
    if inside in _TOP:
        qwen = arch.startswith("qwen") and inside == "norm.weight"
        factor = c.embedding_multiplier if arch == "falcon-h1" and "embed" in inside else 1.0
        yield _TOP[inside], (values + 1.0 if qwen else values) * factor
        return
    _, number, own = inside.split(".", 2)
    stem, _, ending = own.rpartition(".")
    for part, tensor in _parts(stem, ending, values, c, arch):
        yield f"blk.{number}.{part}", tensor


def _parts(stem: str, ending: str, x: Tensor, c: Any, arch: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a layer that one of a folder becomes."""
    if ending == "A_log":
        yield "ssm_a", -x.exp() if x.dim() == 2 else _heads(stem, -x.exp(), c, arch)
    elif ending == "D":
        yield "ssm_d", x if arch in ("mamba", "jamba") else x[:, None]
    elif ending == "dt_bias":
        x = _heads(stem, x, c, arch)
        yield "ssm_dt.bias", x.flatten()
    elif ending == "expert_bias" or ending == "e_score_correction_bias":
        yield "exp_probs_b.bias", x.flatten()
    elif ending == "gate_up_proj":  # of all experts
        gate, up = x.chunk(2, dim=1)
        yield from (("ffn_gate_exps.weight", gate), ("ffn_up_exps.weight", up))
    elif ending in ("down_proj", "up_proj"):
        yield f"{_PARTS[f'{stem}.{ending}']}.weight", x
    elif stem == "shared_mlp.input_linear":
        end = "_shexp" if c.num_local_experts else ""
        gate, up = x.chunk(2)
        yield from ((f"ffn_gate{end}.weight", gate), (f"ffn_up{end}.weight", up))
    elif stem == "shared_mlp.output_linear":
        yield f"ffn_down{'_shexp' if c.num_local_experts else ''}.weight", x
    elif stem == "linear_attn.in_proj_qkvz":
        yield from zip(("attn_qkv.weight", "attn_gate.weight"), _by_kind(x, c), strict=True)
    elif stem == "pre_ff_layernorm":
        yield "ffn_norm.weight" if arch == "jamba" else "ffn_norm", x
    elif stem == "post_attention_layernorm" and arch.startswith("qwen"):
        yield "post_attention_norm.weight", x + 1.0
    else:
        yield f"{_PARTS[stem]}.{ending}", _changed(stem, x, c, arch)


def _changed(stem: str, x: Tensor, c: Any, arch: str) -> Tensor:
    part = stem.rpartition(".")[2]
    if part in ("conv", "conv1d") and x.dim() == 3:
        x = x.squeeze(1)
    if arch.startswith("qwen"):
        if part.endswith("norm") and stem != "linear_attn.norm":
            return x + 1.0
        return _tiled(stem, x.squeeze(0) if part == "shared_expert_gate" else x, c, arch)
    if stem in ("mamba.norm", "mixer.norm"):
        groups = getattr(c, "mamba_n_groups", None) or c.n_groups
        return x.view(groups, -1)
    if arch == "granitehybrid" and part in ("q_proj", "k_proj"):
        heads = c.num_attention_heads if part == "q_proj" else c.num_key_value_heads
        return x.view(heads, 2, -1, c.hidden_size).transpose(1, 2).reshape(x.shape)
    return _multiplied(part, x, c) if arch == "falcon-h1" else x


def _multiplied(part: str, x: Tensor, c: Any) -> Tensor:
    """Falcon-H1's factors in its weights."""
    if x.dim() == 1:  # biases, whose models have factors of 1
        return x
    gate, down = c.mlp_multipliers
    into = c.attention_in_multiplier
    factors = {
        "gate_proj": gate,
        "down_proj": down,
        "q_proj": into,
        "k_proj": into * c.key_multiplier,
        "v_proj": into,
        "o_proj": c.attention_out_multiplier,
        "out_proj": c.ssm_out_multiplier,
    }
    if part != "in_proj":
        return x * factors.get(part, 1.0)
    inner, shared = c.mamba_d_ssm, c.mamba_n_groups * c.mamba_d_state
    sizes = (inner, inner, shared, shared, c.mamba_n_heads)
    each = torch.tensor(c.ssm_multipliers).repeat_interleave(torch.tensor(sizes))
    return x * (each * c.ssm_in_multiplier)[:, None]


def _heads(stem: str, x: Tensor, c: Any, arch: str) -> Tensor:
    """A number for each head: a column for Mamba-2, in another order for Qwen 3.5."""
    return _tiled(stem, x, c, arch) if stem == "linear_attn" else x[:, None]


def _by_kind(x: Tensor, c: Any) -> tuple[Tensor, Tensor]:
    """Queries, keys and values, and gates, of rows by head of keys."""
    heads, each = c.linear_num_key_heads, c.linear_num_value_heads // c.linear_num_key_heads
    wide = each * c.linear_value_head_dim
    sizes = [c.linear_key_head_dim, c.linear_key_head_dim, wide, wide]
    parts = x.view(heads, sum(sizes), -1).split(sizes, dim=1)
    q, k, v, z = (part.reshape(-1, x.shape[1]) for part in parts)
    return torch.cat((q, k, v)), z


def _tiled(stem: str, x: Tensor, c: Any, arch: str) -> Tensor:
    """Qwen 3.5's heads of values, all first ones of a key head before all second ones."""
    if not arch.startswith("qwen35") or "linear_attn" not in stem or stem.endswith(".norm"):
        return x
    heads, width = c.linear_num_key_heads, c.linear_value_head_dim
    if stem.endswith("out_proj"):
        return _turned(x.t(), heads, width).t()
    if stem.endswith(("in_proj_a", "in_proj_b")) or x.dim() == 1:
        return _turned(x, heads, 1)
    skip = 0 if stem.endswith("in_proj_z") else 2 * heads * c.linear_key_head_dim
    return torch.cat((x[:skip], _turned(x[skip:], heads, width)))


def _turned(x: Tensor, heads: int, width: int) -> Tensor:
    return x.reshape(heads, -1, width, *x.shape[1:]).transpose(0, 1).reshape(x.shape)
