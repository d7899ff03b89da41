"""Helium 1: Llama that turns adjacent pairs. Kyutai (2025); transformers' modeling_helium.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.models.architecture import Architecture, Biases, ConfigRules, LayerRules

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields


def _biases(fields: Fields) -> Biases:
    return Biases(
        qkv=fields.flag("attention_bias", default=False),
        mlp=fields.flag("mlp_bias", default=False),
    )


ARCHITECTURE = Architecture(
    "helium",
    layer=LayerRules(adjacent_pairs=True),
    config=ConfigRules(
        keys=("attention_bias", "mlp_bias"),
        defaults={"head_dim": 128, "rope_theta": 100_000.0},
        biases=_biases,
    ),
)
