"""Nemotron 4 and Minitron: LayerNorms whose weights are stored minus 1, an MLP of relu^2, no gate.

Half of a head turns. NVIDIA, "Nemotron-4 15B" (2024), arXiv 2402.16819; transformers'
modeling_nemotron.py.
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
    TensorRules,
)


def read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["hidden_act"] = "relu2"


ARCHITECTURE = Architecture(
    "nemotron",
    layer=LayerRules(norm=LAYER_NORM, gated=False),
    config=ConfigRules(
        keys=("attention_bias", "mlp_bias", "partial_rotary_factor"),
        defaults={"norm_eps": 1e-5, "hidden_act": "relu2", "partial_rotary_factor": 0.5},
        norm_eps="norm_eps",
    ),
    tensors=TensorRules(norms_minus_one=True),
    gguf=GgufRules("nemotron", read=read_gguf),
)
