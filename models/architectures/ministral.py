"""Ministral 8B (2024): Mistral of which some layers slide. transformers' modeling_ministral.py."""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules
from sdk.models.configs.sliding import all_but_every

ARCHITECTURE = Architecture(
    "ministral",
    config=ConfigRules(keys=("layer_types", "sliding_window"), sliding=all_but_every(1)),
)
