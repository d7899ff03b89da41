"""Gemma 3, the text part: Gemma 2 with q/k norms and two rotary embeddings, no soft caps.

Five of six layers slide and have a rotary base of 10,000; every sixth sees all tokens and has a
base of 1,000,000. "Gemma 3 Technical Report" (2025); transformers' modeling_gemma3.py.
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
from sdk.models.architectures.gemma2 import GGUF_TENSORS, read_gguf_layers
from sdk.models.configs.sliding import all_but_every


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["attn_logit_softcapping"] = None
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping")
    read_gguf_layers(config, keys, period=6, largest=62)
    # A scaling is of the global layers only; the local ones have their own base.
    local = keys.number("rope.freq_base_swa", 10000.0)
    config["rope_local_base_freq"] = local
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    config["rope_parameters"] = {
        "full_attention": {"rope_theta": config["rope_theta"], **scaling},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _read_embedding_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    _read_gguf(config, keys)
    config["use_bidirectional_attention"] = True


ARCHITECTURE = Architecture(
    "gemma3_text",
    aliases=("gemma3",),
    layer=LayerRules(norms=NORMS_AROUND, qk_norm="head"),
    config=ConfigRules(
        keys=(
            *("attention_bias", "hidden_activation", "query_pre_attn_scalar", "layer_types"),
            *("sliding_window", "sliding_window_pattern", "_sliding_window_pattern"),
            *("final_logit_softcapping", "rope_local_base_freq", "use_bidirectional_attention"),
        ),
        # transformers' class has the first one, and no code applies it
        ignored=(
            "attn_logit_softcapping",
            *("mm_tokens_per_image", "image_token_index", "boi_token_index", "eoi_token_index"),
        ),
        defaults={
            "head_dim": 256,
            "query_pre_attn_scalar": 256,
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        sliding=all_but_every(6),
        embedding_scale=math.sqrt,
    ),
    tensors=TensorRules(norms_minus_one=True),
    gguf=GgufRules(
        "gemma3",
        tensors=GGUF_TENSORS,
        read=_read_gguf,
        keys=(
            *("final_logit_softcapping", "attention.sliding_window_pattern"),
            *("rope.freq_base_swa",),
        ),
    ),
    # EmbeddingGemma: llama.cpp's window is that of transformers' config before its class halves it
    more_gguf=(
        GgufRules(
            "gemma-embedding",
            tensors=GGUF_TENSORS,
            read=_read_embedding_gguf,
            keys=(
                *("final_logit_softcapping", "attention.sliding_window_pattern"),
                *("rope.freq_base_swa", "dense_2_feat_in", "dense_2_feat_out"),
                *("dense_3_feat_in", "dense_3_feat_out"),
            ),
        ),
    ),
    # The residual stream of the 270M model reaches 104,061. The largest number between its kernels
    # was 451; larger models were not measured.
    wide_range=True,
)
