"""Gemma 2: norms around each block, soft-capped scores and logits, every other layer slides.

Embeddings are scaled by ``sqrt(hidden_size)``; norm weights are stored minus 1. Riviere et al.,
"Gemma 2" (2024); transformers' modeling_gemma2.py.
"""

from __future__ import annotations

import math
from typing import Any

from sdk.models.architecture import (
    NORMS_AROUND,
    Architecture,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    TensorRules,
)
from sdk.models.configs.sliding import all_but_every

#: The names of tensors in GGUF files, also of Gemma 3.
GGUF_TENSORS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def read_gguf_layers(config: dict[str, Any], keys: GgufKeys, period: int, largest: int) -> None:
    """The activation, the sliding layers and the attention scale, also of Gemma 3.

    Scores are divided by the square root of the head size, in the 27B models of hidden size /
    heads. Files do not say which; the number of layers, ``largest``, does.
    """
    config["hidden_activation"] = config["hidden_act"] = "gelu_pytorch_tanh"
    layers = config["num_hidden_layers"]
    config["layer_types"] = keys.layer_types(layers, window=config["sliding_window"], period=period)
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"]
        if layers == largest
        else config["head_dim"]
    )


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["sliding_window"] = config["sliding_window"] or 4096
    config["attn_logit_softcapping"] = keys.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 30.0)
    read_gguf_layers(config, keys, period=2, largest=46)


ARCHITECTURE = Architecture(
    "gemma2",
    layer=LayerRules(norms=NORMS_AROUND),
    config=ConfigRules(
        keys=(
            *("attention_bias", "hidden_activation", "query_pre_attn_scalar", "layer_types"),
            *("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
        ),
        # the first names of these keys, and of what the class does anyway
        ignored=("cache_implementation", "sliding_window_size"),
        defaults={
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        sliding=all_but_every(2),
        embedding_scale=math.sqrt,
    ),
    tensors=TensorRules(norms_minus_one=True),
    gguf=GgufRules(
        "gemma2",
        tensors=GGUF_TENSORS,
        read=_read_gguf,
        keys=(
            *("attn_logit_softcapping", "final_logit_softcapping"),
            *("attention.sliding_window_pattern", "rope.freq_base_swa"),
        ),
        slides="scaled",
    ),
    wide_range=True,  # trained in bfloat16
)
