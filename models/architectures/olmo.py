"""OLMo 1: Llama with LayerNorms of a fixed eps, which have neither weights nor biases.

Queries, keys and values may be clamped. Groeneveld et al., "OLMo" (2024), arXiv 2402.00838;
transformers' modeling_olmo.py.
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
    NormKind,
)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["clip_qkv"] = keys.number("attention.clamp_kqv") or None


def _write_gguf(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    clip = config.get("clip_qkv")
    return {} if clip is None else {"attention.clamp_kqv": float(clip)}


ARCHITECTURE = Architecture(
    "olmo",
    layer=LayerRules(norm=NormKind(centred=True, weight=False)),
    config=ConfigRules(keys=("attention_bias", "clip_qkv"), norm_eps=1e-5),
    gguf=GgufRules(
        "olmo",
        read=_read_gguf,
        write=_write_gguf,
        keys=("attention.clamp_kqv",),
        interleaved_qk=True,
    ),
)
