"""PLaMo 3: norms around each block and of queries and keys; seven of eight layers slide.

Preferred Networks and NICT, "PLaMo 3" (2025); llama.cpp's plamo3.cpp. Folders store norms minus a
number of their own each; GGUF files have whole ones.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    NORMS_AROUND,
    Architecture,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["layer_types"] = keys.layer_types(
        config["num_hidden_layers"], window=config["sliding_window"] or None, period=8
    )


ARCHITECTURE = Architecture(
    "plamo3",
    layer=LayerRules(norms=NORMS_AROUND, qk_norm="head"),
    config=ConfigRules(keys=("layer_types", "sliding_window")),
    more_gguf=(
        GgufRules(
            "plamo3",
            tensors={
                "mlp.gate_up_proj": "ffn_up",
                "pre_feedforward_layernorm": "ffn_norm",
                "post_attention_layernorm.weight": "post_attention_norm",
                "post_feedforward_layernorm.weight": "post_ffw_norm",
            },
            read=_read_gguf,
            keys=("attention.sliding_window_pattern", "rope.freq_base_swa"),
            slides="scaled",
        ),
    ),
    folders=False,
)
