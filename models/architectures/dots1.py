"""dots.llm1: Qwen 3 with DeepSeek V3's experts.

Huo et al., "dots.llm1 Technical Report" (2025); transformers' modeling_dots1.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.models.architecture import Architecture, ConfigRules, GgufRules, LayerRules
from sdk.models.architectures.glm4_moe import V3_KEYS, V3_ROUTE
from sdk.models.configs.fields import Fields
from sdk.quant.errors import UnsupportedError


def _sliding(fields: Fields, layers: int) -> list[bool]:
    """Those from ``max_window_layers`` on."""
    first = fields.values.get("max_window_layers", 62)
    if not isinstance(first, int) or first < 0:
        fields.fail("max_window_layers", "a number of layers", first)
    return [fields.has("sliding_window") and layer >= first for layer in range(layers)]


def _write_gguf(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise UnsupportedError(
            f"{source}: dots1 is written as a GGUF file only without layers that slide: the file "
            "cannot express them"
        )
    return {}


ARCHITECTURE = Architecture(
    "dots1",
    layer=LayerRules(qk_norm="head", route=V3_ROUTE, route_bias=True),
    config=ConfigRules(
        keys=(
            *("attention_bias", "sliding_window", "max_window_layers", "layer_types", *V3_KEYS),
            *("num_local_experts", "first_k_dense_replace"),
        ),
        defaults={"norm_topk_prob": False},
        sliding=_sliding,
        expert_width="moe_intermediate_size",
    ),
    gguf=GgufRules("dots1", write=_write_gguf, expert_gating=2),
)
