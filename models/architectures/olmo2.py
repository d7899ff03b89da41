"""OLMo 2: no norm before a block, one after it, and q/k norms over all heads at once.

OLMo team, "2 OLMo 2 Furious" (2024); transformers' modeling_olmo2.py.
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


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """OLMo 3 has the same name in GGUF files, and a sliding window. transformers runs it."""
    if config["sliding_window"]:
        config["model_type"] = "olmo3"
        config["layer_types"] = keys.layer_types(
            config["num_hidden_layers"], window=config["sliding_window"], period=4
        )


ARCHITECTURE = Architecture(
    "olmo2",
    layer=LayerRules(norms=NORMS_AFTER, qk_norm="width"),
    config=ConfigRules(keys=("attention_bias",)),
    gguf=GgufRules(
        "olmo2",
        tensors={
            "post_attention_layernorm": "post_attention_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
        read=_read_gguf,
        keys=("attention.sliding_window_pattern", "rope.freq_base_swa"),
        slides="plain",  # of OLMo 3
    ),
)
