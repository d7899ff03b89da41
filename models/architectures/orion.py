"""Orion 14B: Llama with LayerNorms. OrionStar (2024), arXiv 2401.12246.

transformers has no class for the folders, which call the eps that of RMSNorms.
"""

from __future__ import annotations

from sdk.models.architecture import LAYER_NORM, Architecture, ConfigRules, GgufRules, LayerRules

ARCHITECTURE = Architecture(
    "orion",
    layer=LayerRules(norm=LAYER_NORM),
    config=ConfigRules(keys=("attention_bias",), defaults={"rms_norm_eps": 1e-5}),
    gguf=GgufRules("orion"),
)
