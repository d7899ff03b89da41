"""Llama 2 and 3.x, SmolLM2 and everything else that calls itself ``llama``.

Pre-norm: each block reads the normalized sum of all before it and adds its output to that sum.
Touvron et al., "Llama 2" (2023); transformers' modeling_llama.py.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, GgufRules

ARCHITECTURE = Architecture(
    "llama",
    aliases=("xverse",),
    config=ConfigRules(keys=("attention_bias", "mlp_bias"), stated=("hidden_act",)),
    gguf=GgufRules("llama", interleaved_qk=True),
    more_gguf=(
        GgufRules("internlm2", interleaved_qk=True),
        GgufRules("xverse", interleaved_qk=True),
        GgufRules("exaone"),
        GgufRules("pangu-embedded"),
    ),
)
