"""Gemma: Llama with GELU, embeddings scaled by ``sqrt(hidden_size)``, norms stored minus 1.

Gemma team, "Gemma" (2024); transformers' modeling_gemma.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sdk.models.architecture import Architecture, ConfigRules, GgufKeys, GgufRules, TensorRules
from sdk.models.configs.fields import activation_named

if TYPE_CHECKING:
    from sdk.kernels.operators.mlp_activations import Activation
    from sdk.models.configs.fields import Fields


def _activation(fields: Fields) -> Activation:
    """The first configs say ``gelu``; the class takes that for the approximation, too."""
    found = fields.text("hidden_act", default="gelu")
    return "gelu_tanh" if found == "gelu" else activation_named(found, "hidden_act")


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["hidden_act"] = "gelu_pytorch_tanh"


ARCHITECTURE = Architecture(
    "gemma",
    config=ConfigRules(
        keys=("attention_bias",),
        # transformers' class reads hidden_act alone
        ignored=("hidden_activation",),
        defaults={"head_dim": 256, "tie_word_embeddings": True},
        activation=_activation,
        embedding_scale=math.sqrt,
    ),
    tensors=TensorRules(norms_minus_one=True),
    gguf=GgufRules("gemma", read=_read_gguf),
    wide_range=True,  # trained in bfloat16
)
