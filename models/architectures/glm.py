"""GLM-4 of 2024: Llama whose heads turn by half, in adjacent pairs; gate and up are one matrix.

GLM team, "ChatGLM" (2024); transformers' modeling_glm.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.models.architecture import Architecture, Biases, ConfigRules, GgufRules, LayerRules

if TYPE_CHECKING:
    from sdk.models.config_fields import Fields


def biases(fields: Fields) -> Biases:
    """Of q, k and v alone."""
    return Biases(qkv=fields.flag("attention_bias", default=True))


ARCHITECTURE = Architecture(
    "glm",
    layer=LayerRules(adjacent_pairs=True),
    config=ConfigRules(
        keys=("attention_bias", "partial_rotary_factor"),
        defaults={"head_dim": 128, "partial_rotary_factor": 0.5},
        biases=biases,
    ),
    gguf=GgufRules("chatglm", tensors={"mlp.gate_up_proj": "ffn_up"}),
)
