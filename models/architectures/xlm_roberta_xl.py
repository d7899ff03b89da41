"""XLM-RoBERTa XL: XLM-RoBERTa's embeddings without their norm, and norms before blocks.

Goyal et al., "Larger-Scale Transformers for Multilingual Masked Language Modeling" (2021), arXiv
2105.00572; transformers' modeling_xlm_roberta_xl.py.
"""

from __future__ import annotations

from sdk.models.architecture import LAYER_NORM, LayerRules, TensorRules
from sdk.models.architectures import bert, roberta

_NAMES = {
    **bert.tensor_names("roberta"),
    "model.norm": "roberta.encoder.LayerNorm",
    "input_layernorm": "attention.self_attn_layer_norm",
    "post_attention_layernorm": "LayerNorm",
}
del _NAMES["model.embed_norm"], _NAMES["post_feedforward_layernorm"]

ARCHITECTURE = roberta.ARCHITECTURE._replace(
    model_type="xlm_roberta_xl",
    aliases=("xlm-roberta-xl",),
    layer=LayerRules(norm=LAYER_NORM, gated=False),
    config=roberta.ARCHITECTURE.config._replace(
        defaults={**roberta.ARCHITECTURE.config.defaults, "type_vocab_size": 1},
    ),
    tensors=TensorRules(names=_NAMES),
    embedding=roberta.ARCHITECTURE.embedding._replace(norm=False),
)
