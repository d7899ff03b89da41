"""MiniCPM 1, 2 and 4: Llama with Granite's factors, which its config has in terms of widths.

Hu et al., "MiniCPM" (2024), arXiv 2404.06395. transformers has no class for the folders.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

from sdk.models.architecture import Architecture, ConfigRules

#: Keys of factors under the names of Granite.
FACTORS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")


def derived(config: dict[str, Any]) -> None:
    """Granite's factors. Values of a wrong type stay under their own names, which nothing reads."""
    layers, hidden = config.get("num_hidden_layers"), config.get("hidden_size")
    config.setdefault("embedding_multiplier", config.pop("scale_emb", 1.0))
    depth, base = config.pop("scale_depth", 1.0), config.pop("dim_model_base", 1)
    if isinstance(layers, int) and layers > 0 and isinstance(depth, int | float):
        config.setdefault("residual_multiplier", depth / sqrt(layers))
    if isinstance(hidden, int) and isinstance(base, int | float) and base > 0:
        config.setdefault("logits_scaling", hidden / base)


ARCHITECTURE = Architecture(
    "minicpm",
    config=ConfigRules(
        keys=("attention_bias", "original_max_position_embeddings", *FACTORS),
        ignored=("scale_emb", "scale_depth", "dim_model_base", "mup_denominator"),
        defaults={"rms_norm_eps": 1e-6, "tie_word_embeddings": True},
        fixed={"num_experts": 0, "sparse_config": None},
        derived=derived,
    ),
)
