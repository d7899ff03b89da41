"""OLMo 2: no norm before a block, one after it, and q/k norms over all heads at once.

OLMo team, "2 OLMo 2 Furious" (2024); transformers' modeling_olmo2.py.
"""

from __future__ import annotations

from sdk.models.architecture import NORMS_AFTER, Architecture, ConfigRules, GgufRules, LayerRules

#: The names of norms after blocks in GGUF files, also of other models.
GGUF_TENSORS = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}

ARCHITECTURE = Architecture(
    "olmo2",
    layer=LayerRules(norms=NORMS_AFTER, qk_norm="width"),
    config=ConfigRules(keys=("attention_bias",)),
    gguf=GgufRules("olmo2", tensors=GGUF_TENSORS),
)
