"""Maincoder: Llama with norms of queries and keys after the rotation, which turns adjacent pairs.

Maincode (2025). transformers has no class for the folders.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, GgufRules, LayerRules

ARCHITECTURE = Architecture(
    "maincoder",
    layer=LayerRules(qk_norm="head", norm_after_rotation=True, adjacent_pairs=True),
    config=ConfigRules(fixed={"attention_bias": False, "mlp_bias": False}),
    gguf=GgufRules("maincoder"),
)
