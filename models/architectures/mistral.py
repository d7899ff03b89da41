"""Mistral: Llama with a sliding window. Jiang et al., "Mistral 7B" (2023).

GGUF files of it call themselves ``llama``; the window tells them apart.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, GgufKeys, GgufRules
from sdk.models.configs.sliding import all_but_every


def _slides_without_experts(keys: GgufKeys) -> bool:
    window = keys.integer("attention.sliding_window", (0, 1 << 31), 0)
    return window > 0 and not keys.expert_count


ARCHITECTURE = Architecture(
    "mistral",
    config=ConfigRules(
        keys=("sliding_window",),
        stated=("hidden_act", "sliding_window"),
        sliding=all_but_every(1),
    ),
    gguf=GgufRules("llama", matches=_slides_without_experts, interleaved_qk=True),
)
