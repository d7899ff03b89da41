"""Jais 2: Llama with LayerNorms, biases everywhere, and an MLP of relu^2 without a gate.

Inception, "Jais 2" (2025), a model of Arabic and English; transformers' modeling_jais2.py.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    LAYER_NORM,
    Architecture,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["hidden_act"] = "relu2"


ARCHITECTURE = Architecture(
    "jais2",
    layer=LayerRules(norm=LAYER_NORM, gated=False),
    config=ConfigRules(
        keys=("attention_bias", "mlp_bias"),
        defaults={
            "layer_norm_eps": 1e-5,
            "hidden_act": "relu2",
            "attention_bias": True,
            "mlp_bias": True,
        },
        norm_eps="layer_norm_eps",
    ),
    gguf=GgufRules("jais2", read=_read_gguf),
)
