"""InternLM 3: Llama with other names for its biases. GGUF files of it call themselves ``llama``."""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules

ARCHITECTURE = Architecture(
    "internlm3",
    config=ConfigRules(
        keys=("attention_bias", "mlp_bias"),
        names={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
        defaults={"head_dim": 128},
    ),
)
