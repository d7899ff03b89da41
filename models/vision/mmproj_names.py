"""The names of a tower's tensors in GGUF files of llama.cpp ("mmproj"), ours to the file's."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

WHOLE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "patches": "v.patch_embd",
        "positions": "v.position_embd",
        "class_token": "v.class_embd",
        "norm_before": "v.pre_ln",
        "norm": "v.post_ln",
    }
)
#: Inside a layer.
LAYER_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "input_layernorm": "ln1",
        "post_attention_layernorm": "ln2",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_out",
        "attention_scale": "ls1.weight",
        "mlp_scale": "ls2.weight",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
)
