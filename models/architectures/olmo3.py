"""OLMo 3: OLMo 2 of which three of four layers slide, with a rotary embedding of their own.

OLMo team, "Olmo 3" (2025); transformers' modeling_olmo3.py. GGUF files of it call themselves
``olmo2``; the window tells them apart.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    NORMS_AFTER,
    Architecture,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
)
from sdk.models.architectures.olmo2 import GGUF_TENSORS
from sdk.models.configs.sliding import all_but_every


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["layer_types"] = keys.layer_types(
        config["num_hidden_layers"], window=config["sliding_window"], period=4
    )


ARCHITECTURE = Architecture(
    "olmo3",
    layer=LayerRules(norms=NORMS_AFTER, qk_norm="width"),
    config=ConfigRules(
        keys=("attention_bias", "layer_types", "sliding_window"),
        defaults={"rope_theta": 500_000.0, "sliding_window": 4096},
        sliding=all_but_every(4),
    ),
    gguf=GgufRules(
        "olmo2",
        matches=lambda keys: keys.integer("attention.sliding_window", (0, 1 << 31), 0) > 0,
        tensors=GGUF_TENSORS,
        read=_read_gguf,
        keys=("attention.sliding_window_pattern", "rope.freq_base_swa"),
        slides="plain",
    ),
)
