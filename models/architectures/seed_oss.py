"""Seed-OSS: Llama with biases on q, k and v. transformers' modeling_seed_oss.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.models.architecture import Architecture, Biases, ConfigRules, GgufRules

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields


def _biases(fields: Fields) -> Biases:
    return Biases(
        qkv=fields.flag("attention_bias", default=True),
        output=fields.flag("attention_out_bias", default=False),
        mlp=fields.flag("mlp_bias", default=False),
    )


ARCHITECTURE = Architecture(
    "seed_oss",
    config=ConfigRules(
        keys=("attention_bias", "attention_out_bias", "mlp_bias"),
        ignored=("residual_dropout",),
        defaults={"head_dim": 128},
        biases=_biases,
    ),
    gguf=GgufRules(
        "seed_oss",
        tensors={"post_attention_layernorm": "post_attention_norm"},
        only={"attention_out_bias": False, "mlp_bias": False},
    ),
)
