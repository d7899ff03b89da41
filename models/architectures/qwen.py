"""Qwen 1: Llama with biases of queries, keys and values, and half the width that its config says.

Bai et al., "Qwen Technical Report" (2023), arXiv 2309.16609. transformers has no class for the
folders. Beyond ``seq_length`` tokens the model scales rotations and queries by the length of the
context, so that is the longest one here.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    Architecture,
    Biases,
    ConfigRules,
    GgufKeys,
    GgufRules,
    TensorRules,
)
from sdk.models.configs.derived import every_head_has_keys


def _derived(config: dict[str, Any]) -> None:
    every_head_has_keys(config)
    width = config.pop("intermediate_size", None)
    if isinstance(width, int):
        config["mlp_width"] = width // 2


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["mlp_width"] = config["intermediate_size"] // 2


ARCHITECTURE = Architecture(
    "qwen",
    config=ConfigRules(
        keys=("mlp_width",),
        ignored=(
            *("attn_dropout_prob", "emb_dropout_prob", "kv_channels", "onnx_safe", "bf16", "fp16"),
            *("fp32", "use_flash_attn", "use_cache_quantization", "use_cache_kernel"),
            *("softmax_in_fp32", "tokenizer_type", "use_dynamic_ntk", "use_logn_attn"),
        ),
        defaults={"layer_norm_epsilon": 1e-6},
        fixed={"no_bias": True, "rotary_pct": 1.0, "scale_attn_weights": True},
        biases=lambda fields: Biases(qkv=True),
        norm_eps="layer_norm_epsilon",
        names={"rope_theta": "rotary_emb_base", "max_position_embeddings": "seq_length"},
        derived=_derived,
        dense_width="mlp_width",
    ),
    tensors=TensorRules(
        names={
            "model.layers": "transformer.h",
            "model.embed_tokens": "transformer.wte",
            "model.norm": "transformer.ln_f",
            "self_attn.qkv_proj": "attn.c_attn",
            "self_attn.o_proj": "attn.c_proj",
            "mlp.gate_proj": "mlp.w2",
            "mlp.up_proj": "mlp.w1",
            "mlp.down_proj": "mlp.c_proj",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
        }
    ),
    more_gguf=(GgufRules("qwen", read=_read_gguf),),
)
