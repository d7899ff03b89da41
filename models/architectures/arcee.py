"""Arcee's AFM: Llama with an MLP of relu^2 and no gate. transformers' modeling_arcee.py."""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, GgufRules, LayerRules
from sdk.models.architectures.nemotron import read_gguf

ARCHITECTURE = Architecture(
    "arcee",
    layer=LayerRules(gated=False),
    config=ConfigRules(keys=("attention_bias", "mlp_bias"), defaults={"hidden_act": "relu2"}),
    gguf=GgufRules(
        "arcee",
        read=read_gguf,
        interleaved_qk=True,
        only={"attention_bias": False, "mlp_bias": False},
    ),
)
