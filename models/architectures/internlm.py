"""InternLM 1: Llama with biases around attention. transformers has no class for the folders; GGUF
files call themselves ``llama``."""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules
from sdk.models.architectures.internlm2 import biases

ARCHITECTURE = Architecture(
    "internlm",
    config=ConfigRules(
        keys=("bias",), defaults={"rms_norm_eps": 1e-6, "bias": True}, biases=biases
    ),
)
