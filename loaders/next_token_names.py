"""Our names of the tensors of a block of multi-token prediction, which come after the last layer.

DeepSeek and GLM call them so themselves: ``model.layers.N.eh_proj`` with N layers before it. Qwen
and EXAONE put them beside the model: ``mtp.fc``, ``mtp.layers.0.…``.
"""

from __future__ import annotations

import re

_BESIDE = re.compile(r"(?:model\.)?mtp\.(.+)")
_LAYER = re.compile(r"layers\.(\d{1,3})\.(.+)")
_PARTS = (
    ("fc.", "eh_proj."),
    ("pre_fc_norm_embedding.", "enorm."),
    ("pre_fc_norm_hidden.", "hnorm."),
    ("norm.", "shared_head.norm."),
)
#: llama.cpp's names inside such a block.
GGUF_PARTS = {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "embed_tokens": "nextn.embed_tokens",
    "shared_head.norm": "nextn.shared_head_norm",
    "shared_head.head": "nextn.shared_head_head",
}


def next_token_name(name: str, layers: int) -> str:
    """Our name of a folder's tensor whose model has so many ``layers``; others keep theirs."""
    beside = _BESIDE.fullmatch(name)
    if beside is None:
        return name
    if (layer := _LAYER.fullmatch(beside[1])) is not None:
        return f"model.layers.{layers + int(layer[1])}.{layer[2]}"
    for theirs, ours in _PARTS:
        if beside[1].startswith(theirs):
            return f"model.layers.{layers}.{ours}{beside[1].removeprefix(theirs)}"
    return name
