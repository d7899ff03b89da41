"""GPT-NeoX and Pythia: attention and MLP side by side, and heads that turn in part.

Black et al., "GPT-NeoX-20B" (2022), arXiv 2204.06745; transformers' modeling_gpt_neox.py.
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
    Norms,
    TensorRules,
)
from sdk.models.configs.derived import every_head_has_keys

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields


def _biases(fields: Fields) -> Biases:
    attention = fields.flag("attention_bias", default=True)
    return Biases(attention, attention, True)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["hidden_act"] = "gelu"
    config["use_parallel_residual"] = keys.flag("use_parallel_residual", True)
    config.setdefault("partial_rotary_factor", 1.0)


def _write_gguf(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    return {"use_parallel_residual": bool(config.get("use_parallel_residual", True))}


ARCHITECTURE = Architecture(
    "gpt_neox",
    layer=LayerRules(norm=LAYER_NORM, parallel_norms=Norms(), gated=False),
    config=ConfigRules(
        keys=("attention_bias", "partial_rotary_factor", "use_parallel_residual"),
        defaults={"layer_norm_eps": 1e-5, "hidden_act": "gelu", "partial_rotary_factor": 0.25},
        biases=_biases,
        norm_eps="layer_norm_eps",
        names={
            "partial_rotary_factor": "rotary_pct",
            "rope_theta": "rotary_emb_base",
        },
        derived=every_head_has_keys,
        parallel_blocks=lambda fields: fields.flag("use_parallel_residual", default=True),
    ),
    tensors=TensorRules(
        names={
            "model.layers": "gpt_neox.layers",
            "model.embed_tokens": "gpt_neox.embed_in",
            "model.norm": "gpt_neox.final_layer_norm",
            "lm_head": "embed_out",
            "self_attn.qkv_proj": "attention.query_key_value",
            "self_attn.o_proj": "attention.dense",
            "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        qkv_by_group=True,
    ),
    gguf=GgufRules(
        "gptneox",
        read=_read_gguf,
        write=_write_gguf,
        keys=("use_parallel_residual",),
        only={"attention_bias": True, "tie_word_embeddings": False},
    ),
)
