"""XGLM: OPT's layers with GELU, and sines of positions that are computed in place of a table.

Lin et al., "Few-shot Learning with Multilingual Language Models" (2021), arXiv 2112.10668;
transformers' modeling_xglm.py. llama.cpp does not know the model.
"""

from __future__ import annotations

import math
from typing import Any

from sdk.models.architecture import (
    LAYER_NORM,
    Architecture,
    Biases,
    ConfigRules,
    EmbeddingRules,
    LayerRules,
    TensorRules,
)
from sdk.models.architectures.gpt2 import no_rotation
from sdk.models.configs.derived import every_head_has_keys


def _derived(config: dict[str, Any]) -> None:
    every_head_has_keys(config)
    hidden = config.get("hidden_size")
    if config.get("scale_embedding", True) and type(hidden) is int and hidden > 0:
        config["embedding_multiplier"] = math.sqrt(hidden)


ARCHITECTURE = Architecture(
    "xglm",
    layer=LayerRules(norm=LAYER_NORM, gated=False),
    config=ConfigRules(
        keys=("scale_embedding", "embedding_multiplier", "pad_token_id"),
        ignored=("dropout", "layerdrop", "init_std", "activation_dropout"),
        defaults={"hidden_act": "gelu", "tie_word_embeddings": True},
        fixed={"add_cross_attention": False},
        unrotated=no_rotation,
        biases=lambda fields: Biases(True, True, True),
        norm_eps=1e-5,  # torch's default
        names={
            "hidden_size": "d_model",
            "intermediate_size": "ffn_dim",
            "num_attention_heads": "attention_heads",
            "num_hidden_layers": "num_layers",
            "hidden_act": "activation_function",
        },
        derived=_derived,
    ),
    tensors=TensorRules(
        names={
            "model.norm": "model.layer_norm",
            "self_attn.o_proj": "self_attn.out_proj",
            "mlp.up_proj": "fc1",
            "mlp.down_proj": "fc2",
            "input_layernorm": "self_attn_layer_norm",
            "post_attention_layernorm": "final_layer_norm",
        },
    ),
    embedding=EmbeddingRules(positions=2, sines=True),
)
