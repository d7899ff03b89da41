"""RoBERTa with norms before blocks, as in a GPT-2, and one after the layers.

Ott et al., "fairseq" (2019), arXiv 1904.01038; transformers' modeling_roberta_prelayernorm.py.
"""

from __future__ import annotations

from sdk.models.architecture import LAYER_NORM, LayerRules, TensorRules
from sdk.models.architectures import bert, roberta

ARCHITECTURE = roberta.ARCHITECTURE._replace(
    model_type="roberta_prelayernorm",
    aliases=("roberta-prelayernorm",),
    layer=LayerRules(norm=LAYER_NORM, gated=False),
    tensors=TensorRules(
        names={
            **bert.tensor_names("roberta_prelayernorm"),
            "model.norm": "roberta_prelayernorm.LayerNorm",
            "input_layernorm": "attention.LayerNorm",
            "post_attention_layernorm": "intermediate.LayerNorm",
        }
    ),
)
