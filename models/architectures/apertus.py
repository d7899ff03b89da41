"""Apertus: Llama with norms of each query and key, and an MLP of xIELU without a gate.

The activation has two trained numbers in each layer. Swiss AI, "Apertus" (2025), arXiv 2509.14233;
transformers' modeling_apertus.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.models.architecture import (
    Architecture,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    Norms,
)

_NUMBERS = ("alpha_p", "alpha_n", "beta", "eps")
_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["hidden_act"] = "xielu"
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    config["rope_parameters"] = {"rope_theta": config["rope_theta"], **scaling}


ARCHITECTURE = Architecture(
    "apertus",
    layer=LayerRules(
        norms=Norms("attention_layernorm", None, "feedforward_layernorm", None),
        qk_norm="head",
        gated=False,
    ),
    config=ConfigRules(
        keys=("attention_bias",),
        defaults={"hidden_act": "xielu", "rope_parameters": _ROPE},
        fixed={"hidden_act": "xielu"},
        activation=lambda fields: "xielu",
    ),
    gguf=GgufRules(
        "apertus",
        tensors={"attention_layernorm": "attn_norm", "feedforward_layernorm": "ffn_norm"},
        read=_read_gguf,
        numbers={f"mlp.act_fn.{name}": f"xielu.{name}" for name in _NUMBERS},
    ),
)
