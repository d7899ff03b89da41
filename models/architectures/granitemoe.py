"""Granite 3 with experts. transformers' modeling_granitemoe.py."""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, GgufKeys, GgufRules
from sdk.models.architectures.granite import MULTIPLIERS, read_gguf, write_multipliers

KEYS = (
    *("attention_bias", "num_local_experts", "num_experts", "num_experts_per_tok"),
    *MULTIPLIERS,
)
DEFAULTS = {"attention_multiplier": 1.0}


def has_shared(keys: GgufKeys) -> bool:
    """Whether a file's model has shared experts: then it is granitemoeshared."""
    return keys.integer("expert_shared_feed_forward_length", (0, 1 << 20), 0) > 0


ARCHITECTURE = Architecture(
    "granitemoe",
    config=ConfigRules(keys=KEYS, defaults=DEFAULTS, expert_width="intermediate_size"),
    gguf=GgufRules(
        "granitemoe",
        read=read_gguf,
        write=write_multipliers,
        keys=(*MULTIPLIERS.values(), "rope.scaling.finetuned"),
        interleaved_qk=True,
    ),
)
