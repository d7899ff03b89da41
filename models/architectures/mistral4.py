"""Mistral Small 4: latent attention whose queries grow with the logarithm of their position.

Experts are weighed by a softmax over all of them. transformers' modeling_mistral4.py.
"""

from __future__ import annotations

from typing import Any

from sdk.kernels.operators.route_rule import RouteRule
from sdk.models.architecture import Architecture, ConfigRules, GgufKeys, GgufRules, LayerRules
from sdk.models.architectures.deepseek_v3 import GGUF_KEYS, IGNORED
from sdk.models.architectures.glm4_moe import V3_KEYS
from sdk.models.architectures.ministral3 import query_scale
from sdk.models.configs.latent import LATENT_KEYS, latent_of, read_latent, without_share


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """YaRN's ``mscale_all_dim`` is stored as a tenth; ``mscale`` is 1."""
    read_latent(config, keys)
    rope = config.get("rope_scaling")
    if rope and rope.get("mscale_all_dim"):
        rope["mscale_all_dim"] = round(10 * rope["mscale_all_dim"], 6)


ARCHITECTURE = Architecture(
    "mistral4",
    layer=LayerRules(route=RouteRule("softmax", epsilon=1e-20)),
    config=ConfigRules(
        keys=(*LATENT_KEYS, *V3_KEYS, "num_local_experts", "first_k_dense_replace"),
        ignored=IGNORED,
        defaults={"n_shared_experts": 1, "first_k_dense_replace": 0, "rms_norm_eps": 1e-6},
        fixed={"scoring_func": "softmax"},
        rotation=without_share,
        query_scale=query_scale,
        expert_width="moe_intermediate_size",
        latent=latent_of,
    ),
    more_gguf=(GgufRules("mistral4", read=_read_gguf, keys=GGUF_KEYS, yarn_log_multiplier=True),),
)
