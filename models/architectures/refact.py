"""Refact 1.6B: Llama with linear biases of attention, and one key/value head. Only GGUF files.

Small Magellanic Cloud AI (2023). Folders call themselves ``gpt_refact``.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, GgufRules
from sdk.models.architectures.gpt2 import no_rotation
from sdk.models.configs.score_biases import Alibi

ARCHITECTURE = Architecture(
    "refact",
    config=ConfigRules(unrotated=no_rotation, alibi=lambda fields: Alibi()),
    more_gguf=(GgufRules("refact"),),
    folders=False,
)
