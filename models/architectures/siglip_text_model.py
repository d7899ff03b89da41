"""The encoder of texts of SigLIP 1 and 2: CLIP's layers with attention both ways, over texts
that are filled up to one length.

Zhai et al. 2023, arXiv 2303.15343; Tschannen et al. 2025, arXiv 2502.14786; transformers'
modeling_siglip.py. Its encoder of images is in :mod:`sdk.models.vision.siglip_dual`.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, EmbeddingRules, TensorRules
from sdk.models.architectures.clip_text_model import LAYER, NAMES, text_rules
from sdk.models.configs.dual_rules import DualRules

_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 64,
    "hidden_act": "gelu_pytorch_tanh",
    "layer_norm_eps": 1e-6,
}

ARCHITECTURE = Architecture(
    "siglip_text_model",
    aliases=("siglip2_text_model",),
    layer=LAYER,
    config=text_rules(_DEFAULTS, ("projection_size",), causal=False),
    tensors=TensorRules(names=NAMES),
    embedding=EmbeddingRules(positions=0),
    dual=DualRules("text_model.head", filled=True, lower_case=True, each=True),
)
