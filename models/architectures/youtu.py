"""Youtu-LLM: Llama with DeepSeek's latent attention.

transformers' modeling_youtu.py. GGUF files call themselves ``deepseek2`` and have no experts.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, GgufKeys, GgufRules
from sdk.models.architectures.deepseek_v3 import GGUF_KEYS, read_deepseek2
from sdk.models.configs.latent import LATENT_KEYS, latent_of


def _is_dense(keys: GgufKeys) -> bool:
    return keys.expert_count == 0


ARCHITECTURE = Architecture(
    "youtu",
    config=ConfigRules(
        keys=LATENT_KEYS,
        ignored=("qk_head_dim", "embedding_initializer_range"),
        defaults={"tie_word_embeddings": True, "rms_norm_eps": 1e-6},
        latent=latent_of,
    ),
    more_gguf=(
        GgufRules(
            "deepseek2",
            matches=_is_dense,
            read=read_deepseek2,
            keys=GGUF_KEYS,
            ignored=("leading_dense_block_count", "expert_feed_forward_length"),
            yarn_log_multiplier=True,
        ),
    ),
)
