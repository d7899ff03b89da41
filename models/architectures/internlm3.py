"""InternLM 3: Llama whose configs call the biases ``qkv_bias`` and ``bias``, all of which are one.

transformers' modular_internlm3.py. GGUF files of it call themselves ``llama``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.models.architecture import Architecture, Biases, ConfigRules

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields


def _biases(fields: Fields) -> Biases:
    attention = fields.flag("qkv_bias", default=fields.flag("attention_bias", default=False))
    return Biases(
        attention, attention, fields.flag("bias", default=fields.flag("mlp_bias", default=False))
    )


ARCHITECTURE = Architecture(
    "internlm3",
    config=ConfigRules(
        keys=("attention_bias", "mlp_bias", "qkv_bias", "bias"),
        defaults={"head_dim": 128},
        biases=_biases,
    ),
)
