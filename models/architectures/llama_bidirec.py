"""Llamas that were trained to see both ways, with a name of their own: NVIDIA's embedding models.

transformers has no such class; the files' own code changes the mask of a Llama and nothing else.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, GgufRules

ARCHITECTURE = Architecture(
    "llama_bidirec",
    config=ConfigRules(
        keys=("attention_bias", "mlp_bias"),
        ignored=("pooling", "temperature"),
        stated=(),
        causal=False,
    ),
    gguf=GgufRules("llama-embed", interleaved_qk=True),
)
