"""Qwen 3.5 to 3.8 with experts, the text part: Qwen 3.5 with Qwen 3-Next's experts.

transformers' modeling_qwen3_5_moe.py.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, GgufRules, NextTokenRules
from sdk.models.architectures.qwen2_vl_text import MEDIA_KEYS
from sdk.models.architectures.qwen3_5_text import read_tiled
from sdk.models.architectures.qwen3_next import (
    DEFAULTS,
    EXPERT_KEYS,
    GGUF_KEYS,
    GGUF_TENSORS,
    IGNORED,
    KEYS,
    KINDS,
    LAYER,
    TENSORS,
    derived,
    recurrent,
)

ARCHITECTURE = Architecture(
    "qwen3_5_moe_text",
    aliases=("qwen3_5_moe",),
    layer=LAYER,
    config=ConfigRules(
        keys=(*KEYS, *EXPERT_KEYS),
        ignored=(*IGNORED, *MEDIA_KEYS, "mlp_only_layers"),
        defaults={**DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8},
        fixed={"hidden_act": "silu"},
        derived=derived,
        expert_width="moe_intermediate_size",
        kinds=KINDS,
        recurrent=recurrent,
    ),
    tensors=TENSORS,
    more_gguf=(GgufRules("qwen35moe", tensors=GGUF_TENSORS, read=read_tiled, keys=GGUF_KEYS),),
    next_token=NextTokenRules(),
)
