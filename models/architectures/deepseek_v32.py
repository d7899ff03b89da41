"""DeepSeek V3.2: V3 whose tokens attend to those that an indexer chooses.

DeepSeek-AI, "DeepSeek-V3.2" (2025), arXiv 2512.02556; transformers' modeling_deepseek_v32.py. The
indexer chooses ``index_topk`` tokens, which are all of a context that is no longer. Up to there the
model is V3, and it does not run beyond.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    Architecture,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    NextTokenRules,
)
from sdk.models.architectures.deepseek_v3 import GGUF_KEYS, IGNORED
from sdk.models.architectures.glm4_moe import V3_KEYS, V3_ROUTE
from sdk.models.configs.latent import LATENT_KEYS, latent_of, read_latent

#: Metadata of files, of which the indexer alone has all but the number of tokens.
INDEXER_KEYS = (
    *GGUF_KEYS,
    *("attention.indexer.head_count", "attention.indexer.key_length", "attention.indexer.top_k"),
    *("attention.indexer.types", "rope.dimension_sections"),
)
#: What an indexer has in a config, which changes nothing as long as it chooses all tokens.
INDEXER_IGNORED = (
    *(*IGNORED, "index_head_dim", "index_n_heads", "indexer_types", "index_topk_freq"),
    *("index_skip_topk_offset", "index_topk_pattern", "indexer_rope_interleave", "layer_types"),
)


def read_indexed(config: dict[str, Any], keys: GgufKeys) -> None:
    """The widths, YaRN's ``mscale_all_dim``, of which a file has a tenth, and the indexer's."""
    read_latent(config, keys)
    rope = config.get("rope_scaling")
    if rope and rope.get("mscale_all_dim"):
        rope["mscale_all_dim"] = round(10 * rope["mscale_all_dim"], 6)
    config["index_topk"] = keys.integer("attention.indexer.top_k", (1, 1 << 20))


def _derived(config: dict[str, Any]) -> None:
    """All layers attend to the tokens that an indexer chooses."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and all(kind == "indexed_attention" for kind in kinds):
        config["layer_types"] = None


#: How configs of the family are read.
INDEXED = ConfigRules(
    keys=(
        *(*LATENT_KEYS, *V3_KEYS, "num_local_experts", "first_k_dense_replace"),
        *("mlp_layer_types", "index_topk"),
    ),
    ignored=INDEXER_IGNORED,
    defaults={
        "n_group": 8,
        "topk_group": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-6,
        "index_topk": 2048,
    },
    fixed={"scoring_func": "sigmoid", "rope_interleave": True, "mlp_bias": False},
    derived=_derived,
    expert_width="moe_intermediate_size",
    latent=latent_of,
)

ARCHITECTURE = Architecture(
    "deepseek_v32",
    layer=LayerRules(route=V3_ROUTE, route_bias=True),
    config=INDEXED,
    more_gguf=(
        GgufRules(
            "deepseek32",
            read=read_indexed,
            expert_gating=2,
            keys=INDEXER_KEYS,
            yarn_log_multiplier=True,
        ),
    ),
    next_token=NextTokenRules(),
)
