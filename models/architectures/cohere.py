"""Command R: attention and MLP read one LayerNorm without a bias and are added to the sum at once.

Dimensions 2i and 2i + 1 of a head turn together. Cohere (2024); transformers' modeling_cohere.py.
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
    always,
)
from sdk.quant.errors import UnsupportedError

LAYER = LayerRules(norm=NormKind(centred=True), adjacent_pairs=True)
_NORMS_OF_HEADS = LAYER._replace(qk_norm="each_head")  # Command R+
DEFAULTS: Mapping[str, Any] = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "tie_word_embeddings": True,
}


def read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["logit_scale"] = keys.number("logit_scale") or 1.0


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    read_gguf(config, keys)
    config["use_qk_norm"] = keys.has_tensor("blk.0.attn_q_norm.weight")


def _write_gguf(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    large = config["num_hidden_layers"] >= 64
    if config.get("use_qk_norm", False) != large:
        raise UnsupportedError(
            f"{source}: cohere is written as a GGUF file only with use_qk_norm {large}, found "
            f"{not large}: llama.cpp goes by the number of layers, which is 64 in Command R+"
        )
    return write_gguf(config, source)


def write_gguf(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    return {"logit_scale": float(config["logit_scale"])}


ARCHITECTURE = Architecture(
    "cohere",
    layer=_NORMS_OF_HEADS,
    config=ConfigRules(
        keys=("attention_bias", "logit_scale", "use_qk_norm"),
        defaults={**DEFAULTS, "rope_theta": 500_000.0},
        qk_norm=lambda fields: fields.flag("use_qk_norm", default=False),
        norm_eps="layer_norm_eps",
        parallel_blocks=always,
    ),
    gguf=GgufRules("command-r", read=_read_gguf, write=_write_gguf, keys=("logit_scale",)),
)
