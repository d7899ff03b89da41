"""Qwen 3.5, 3.6 and 3.8, the text part: Qwen 3-Next's layers with an MLP instead of experts.

With text alone its interleaved rotation is the usual one. llama.cpp's converter puts heads of
values in another order. transformers' modeling_qwen3_5.py.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import Architecture, ConfigRules, GgufKeys, GgufRules, NextTokenRules
from sdk.models.architectures.qwen2_vl_text import MEDIA_KEYS
from sdk.models.architectures.qwen3_next import (
    DEFAULTS,
    GGUF_KEYS,
    GGUF_TENSORS,
    IGNORED,
    KEYS,
    KINDS,
    LAYER,
    TENSORS,
    derived,
    read_gguf,
    recurrent,
)


def read_tiled(config: dict[str, Any], keys: GgufKeys) -> None:
    """Files have all first heads of values of a key head before all second ones."""
    read_gguf(config, keys)
    config["value_heads_tiled"] = True


ARCHITECTURE = Architecture(
    "qwen3_5_text",
    aliases=("qwen3_5",),
    layer=LAYER,
    config=ConfigRules(
        keys=KEYS,
        ignored=(*IGNORED, *MEDIA_KEYS, "mlp_only_layers"),
        defaults=DEFAULTS,
        fixed={"hidden_act": "silu"},
        derived=derived,
        kinds=KINDS,
        recurrent=recurrent,
    ),
    tensors=TENSORS,
    more_gguf=(GgufRules("qwen35", tensors=GGUF_TENSORS, read=read_tiled, keys=GGUF_KEYS),),
    next_token=NextTokenRules(),
)
