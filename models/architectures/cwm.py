"""Code World Model: Llama of which every fourth layer, from the first one on, sees all tokens.

Meta FAIR, "CWM" (2025); transformers' modeling_cwm.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.models.architecture import Architecture, ConfigRules

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields


def all_but_first_of_four(fields: Fields, layers: int) -> list[bool]:
    """A config without ``layer_types``; without a window no layer slides."""
    slides = bool(fields.values.get("sliding_window"))
    return [slides and i % 4 != 0 for i in range(layers)]


ARCHITECTURE = Architecture(
    "cwm",
    config=ConfigRules(
        keys=("mlp_bias", "layer_types", "sliding_window"),
        defaults={"head_dim": 128, "rope_theta": 1_000_000.0, "sliding_window": 8192},
        sliding=all_but_first_of_four,
    ),
)
