"""Granite 3 with experts and shared ones. transformers' modeling_granitemoeshared.py."""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, GgufRules
from sdk.models.architectures.granite import MULTIPLIERS, read_gguf
from sdk.models.architectures.granitemoe import DEFAULTS, KEYS, has_shared

ARCHITECTURE = Architecture(
    "granitemoeshared",
    config=ConfigRules(
        keys=(*KEYS, "shared_intermediate_size"),
        defaults=DEFAULTS,
        expert_width="intermediate_size",
    ),
    # Not written: their folders have gate and up of the shared experts in one matrix.
    more_gguf=(
        GgufRules(
            "granitemoe",
            matches=has_shared,
            read=read_gguf,
            keys=(*MULTIPLIERS.values(), "rope.scaling.finetuned"),
            interleaved_qk=True,
        ),
    ),
)
