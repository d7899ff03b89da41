"""GLM-4 of 2024: Llama whose heads turn by half, in adjacent pairs; gate and up are one matrix.

GLM team, "ChatGLM" (2024); transformers' modeling_glm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdk.models.architecture import Architecture, Biases, ConfigRules, GgufRules, LayerRules
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields


def biases(fields: Fields) -> Biases:
    """Of q, k and v alone."""
    return Biases(qkv=fields.flag("attention_bias", default=True))


def _write_gguf(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    hidden, heads, width = (
        config.get(x) for x in ("hidden_size", "num_attention_heads", "head_dim")
    )
    if width is not None and heads * width != hidden:
        raise UnsupportedError(
            f"{source}: glm is written as a GGUF file only with heads that are hidden_size "
            f"{hidden} together, found {heads} of {width}: llama.cpp has no others"
        )
    return {}


ARCHITECTURE = Architecture(
    "glm",
    layer=LayerRules(adjacent_pairs=True),
    config=ConfigRules(
        keys=("attention_bias", "partial_rotary_factor"),
        defaults={"head_dim": 128, "partial_rotary_factor": 0.5},
        biases=biases,
    ),
    gguf=GgufRules("chatglm", tensors={"mlp.gate_up_proj": "ffn_up"}, write=_write_gguf),
)
