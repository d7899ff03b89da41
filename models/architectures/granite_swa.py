"""Granite with sliding windows, attention sinks and a rotary base for each layer.

transformers' modeling_granite_swa.py. A base of 0 stands for a layer that does not rotate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.models.architecture import Architecture, ConfigRules, GgufKeys, GgufRules, LayerRules
from sdk.models.architectures.cwm import all_but_first_of_four
from sdk.models.architectures.granite import MULTIPLIERS, read_multipliers, write_multipliers
from sdk.quant.errors import UnsupportedError

_PATTERN = "attention.rope_pattern"


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    layers = config["num_hidden_layers"]
    read_multipliers(config, keys)
    config["layer_types"] = keys.layer_types(layers, window=config["sliding_window"], period=4)
    rotates = keys.get(_PATTERN)
    if rotates is not None:
        found = list(rotates)
        if len(found) != layers:
            raise UnsupportedError(
                f"{keys.source}: granite_swa.{_PATTERN}: expected {layers} values, found {found}"
            )
        config["layer_rope_theta"] = [config["rope_theta"] if one else 0 for one in found]


def _write_gguf(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    base = (config.get("rope_parameters") or config)["rope_theta"]
    bases = config.get("layer_rope_theta") or [base] * config["num_hidden_layers"]
    if not {*bases} <= {0, base}:
        raise UnsupportedError(
            f"{source}: granite_swa is written as a GGUF file only if every layer has the base "
            f"{base} or 0, found {sorted({*bases})}: the file cannot express anything else"
        )
    kinds = config.get("layer_types") or ["full_attention" if i % 4 == 0 else "" for i in bases]
    return {
        **write_multipliers(config, source),
        "attention.sliding_window_pattern": [kind != "full_attention" for kind in kinds],
        _PATTERN: [bool(one) for one in bases],
    }


ARCHITECTURE = Architecture(
    "granite_swa",
    layer=LayerRules(sinks=True),
    config=ConfigRules(
        keys=(
            *("attention_bias", "mlp_bias", *MULTIPLIERS),
            *("sliding_window", "layer_types", "layer_rope_theta"),
        ),
        defaults={
            "attention_multiplier": 1.0,
            "sliding_window": 128,
            "tie_word_embeddings": True,
        },
        sliding=all_but_first_of_four,
    ),
    gguf=GgufRules(
        "granite_swa",
        tensors={"self_attn.sinks": "attn_sinks"},
        read=_read_gguf,
        write=_write_gguf,
        keys=(*MULTIPLIERS.values(), "attention.sliding_window_pattern", _PATTERN),
        interleaved_qk=True,
    ),
)
