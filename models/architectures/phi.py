"""Phi 1, 1.5 and 2: parallel blocks that read one LayerNorm, an MLP of GELU, biases everywhere.

A part of each head turns; the head of the model has a bias too. Microsoft, "Textbooks Are All You
Need II" (2023), arXiv 2309.05463; transformers' modeling_phi.py.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    LAYER_NORM,
    Architecture,
    Biases,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    TensorRules,
    always,
)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["hidden_act"] = "gelu_new"


ARCHITECTURE = Architecture(
    "phi",
    layer=LayerRules(norm=LAYER_NORM, gated=False),
    config=ConfigRules(
        keys=("partial_rotary_factor",),
        defaults={
            "layer_norm_eps": 1e-5,
            "hidden_act": "gelu_new",
            "partial_rotary_factor": 0.5,
        },
        fixed={"qk_layernorm": False},
        biases=lambda fields: Biases(qkv=True, output=True, mlp=True, head=True),
        norm_eps="layer_norm_eps",
        parallel_blocks=always,
    ),
    tensors=TensorRules(
        names={
            "model.norm": "model.final_layernorm",
            "self_attn.o_proj": "self_attn.dense",
            "mlp.up_proj": "mlp.fc1",
            "mlp.down_proj": "mlp.fc2",
        }
    ),
    gguf=GgufRules("phi2", read=_read_gguf, only={"tie_word_embeddings": False}),
)
