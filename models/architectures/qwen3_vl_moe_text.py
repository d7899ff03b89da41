"""Qwen 3-VL with experts, the text part: Qwen 3 with experts.

transformers' modeling_qwen3_vl_moe.py.
"""

from __future__ import annotations

from sdk.models.architecture import (
    Architecture,
    ConfigRules,
    GgufRules,
    LayerRules,
    TensorRules,
)
from sdk.models.architectures.qwen2_vl_text import MEDIA_KEYS
from sdk.models.architectures.qwen3_moe import read_gguf

ARCHITECTURE = Architecture(
    "qwen3_vl_moe_text",
    aliases=("qwen3_vl_moe",),
    layer=LayerRules(qk_norm="head"),
    config=ConfigRules(
        keys=(
            *("attention_bias", "num_experts", "num_local_experts", "num_experts_per_tok"),
            *("moe_intermediate_size", "decoder_sparse_step", "mlp_only_layers"),
        ),
        ignored=(*MEDIA_KEYS, "norm_topk_prob", "layer_types", "sliding_window"),
        defaults={"rope_theta": 500_000.0},
        expert_width="moe_intermediate_size",
    ),
    # transposed in the published files, not in those that transformers 5 saves
    tensors=TensorRules(experts_transposed="sometimes"),
    gguf=GgufRules("qwen3vlmoe", read=read_gguf, keys=("n_deepstack_layers",)),
)
