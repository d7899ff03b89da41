"""StableLM 3B and 2: Llama with LayerNorms, of which a part of each head turns.

In the 12B model attention and MLP are parallel, and each head of q and k has a LayerNorm of its
own. Stability AI (2023); transformers' modeling_stablelm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdk.models.architecture import (
    LAYER_NORM,
    Architecture,
    Biases,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
)

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields


def _biases(fields: Fields) -> Biases:
    return Biases(qkv=fields.flag("use_qkv_bias", default=False))


def _parallel(fields: Fields) -> bool:
    return fields.flag("use_parallel_residual", default=False)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """llama.cpp goes by the second norm; the first files have a wrong flag or none."""
    config["use_qkv_bias"] = config["attention_bias"]
    config["qk_layernorm"] = keys.has_tensor("blk.0.attn_q_norm.weight")
    config["use_parallel_residual"] = not keys.has_tensor("blk.0.ffn_norm.weight")


def _write_gguf(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    return {"use_parallel_residual": bool(config["use_parallel_residual"])}


ARCHITECTURE = Architecture(
    "stablelm",
    layer=LayerRules(norm=LAYER_NORM, qk_norm="each_head"),
    config=ConfigRules(
        keys=(*("use_qkv_bias", "use_parallel_residual", "qk_layernorm", "partial_rotary_factor"),),
        ignored=("hidden_dropout",),
        defaults={
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": False,
        },
        qk_norm=lambda fields: fields.flag("qk_layernorm", default=False),
        biases=_biases,
        norm_eps="layer_norm_eps",
        parallel_blocks=_parallel,
    ),
    gguf=GgufRules(
        "stablelm",
        read=_read_gguf,
        write=_write_gguf,
        keys=("use_parallel_residual",),
    ),
)
