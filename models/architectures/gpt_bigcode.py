"""StarCoder and SantaCoder: GPT-2 whose query heads share one key and one value head.

Li et al., "StarCoder" (2023), arXiv 2305.06161; transformers' modeling_gpt_bigcode.py.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    LAYER_NORM,
    Architecture,
    ConfigRules,
    EmbeddingRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    TensorRules,
)
from sdk.models.architectures.gpt2 import KEYS, NAMES, all_biases, no_rotation
from sdk.models.configs.derived import every_head_has_keys, four_times_wide


def _derived(config: dict[str, Any]) -> None:
    every_head_has_keys(config)
    if config.get("multi_query", True):
        config["num_key_value_heads"] = 1
    four_times_wide(config)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["hidden_act"] = "gelu_pytorch_tanh"
    config["multi_query"] = config["num_key_value_heads"] == 1


ARCHITECTURE = Architecture(
    "gpt_bigcode",
    layer=LayerRules(norm=LAYER_NORM, gated=False),
    config=ConfigRules(
        keys=("multi_query",),
        ignored=(
            *("attn_pdrop", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"),
            *("summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
            *("summary_type", "summary_use_proj", "inference_runner", "max_batch_size"),
            *("max_sequence_length", "pad_key_length", "pre_allocate_kv_cache"),
            "validate_runner_input",
        ),
        defaults={
            "layer_norm_epsilon": 1e-5,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        fixed={"scale_attn_weights": True},
        unrotated=no_rotation,
        biases=all_biases,
        norm_eps="layer_norm_epsilon",
        names=KEYS,
        derived=_derived,
    ),
    tensors=TensorRules(names=NAMES, qkv_by_group=True),
    gguf=GgufRules("starcoder", read=_read_gguf),
    embedding=EmbeddingRules(positions=0),
)
