"""GLM-4 of 2025 (0414): GLM with a norm after each block, too. transformers' modeling_glm4.py."""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    Architecture,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    Norms,
)
from sdk.models.architectures.glm import biases
from sdk.quant.errors import UnsupportedError


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """Files of GLM-4.1V and GLM-OCR have the rows of queries and keys in another order."""
    found = keys.get("rope.dimension_sections")
    sections = [] if found is None else list(found)
    if any(sections):
        raise UnsupportedError(
            f"{keys.source}: glm4.rope.dimension_sections: expected none, found {sections}: the "
            "text part of a vision model, which is not supported"
        )


ARCHITECTURE = Architecture(
    "glm4",
    layer=LayerRules(
        norms=Norms(
            "input_layernorm",
            "post_self_attn_layernorm",
            "post_attention_layernorm",
            "post_mlp_layernorm",
        ),
        adjacent_pairs=True,
    ),
    config=ConfigRules(
        keys=("attention_bias", "partial_rotary_factor"),
        defaults={"head_dim": 128, "partial_rotary_factor": 0.5},
        biases=biases,
    ),
    gguf=GgufRules(
        "glm4",
        tensors={
            "mlp.gate_up_proj": "ffn_up",
            "post_self_attn_layernorm": "post_attention_norm",
            "post_mlp_layernorm": "post_ffw_norm",
        },
        read=_read_gguf,
    ),
)
