"""ERNIE 4.5 without experts: Llama that turns adjacent pairs.

transformers' modeling_ernie4_5.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.models.architecture import Architecture, Biases, ConfigRules, GgufRules, LayerRules

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields


def biases(fields: Fields) -> Biases:
    every = fields.flag("use_bias", default=False)
    return Biases(every, every, every)


ARCHITECTURE = Architecture(
    "ernie4_5",
    layer=LayerRules(adjacent_pairs=True),
    config=ConfigRules(
        keys=("use_bias",),
        defaults={"head_dim": 128, "rope_theta": 500_000.0, "tie_word_embeddings": True},
        biases=biases,
    ),
    gguf=GgufRules("ernie4_5", only={"use_bias": False}),
)
