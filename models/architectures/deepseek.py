"""DeepSeekMoE: experts weighed by a softmax over all of them, shared ones, and dense first layers.

Dai et al., "DeepSeekMoE" (2024), arXiv 2401.06066. transformers has no class for the folders. GGUF
files of Ling 1 (``bailingmoe``) and of DeepSeek-OCR hold the same computation.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, GgufRules
from sdk.models.architectures.bailing_moe import LAYER

ARCHITECTURE = Architecture(
    "deepseek",
    layer=LAYER,
    config=ConfigRules(
        keys=(
            *("attention_bias", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
            *("moe_intermediate_size", "first_k_dense_replace", "norm_topk_prob"),
        ),
        ignored=("aux_loss_alpha", "seq_aux", "ep_size"),
        defaults={"rms_norm_eps": 1e-6, "norm_topk_prob": False, "first_k_dense_replace": 0},
        fixed={"moe_layer_freq": 1, "scoring_func": "softmax"},
        expert_width="moe_intermediate_size",
    ),
    more_gguf=(
        GgufRules("deepseek", interleaved_qk=True),
        GgufRules("deepseek2-ocr"),
    ),
)
