"""DeepSeek V2 and V2 Lite: latent attention, and experts weighed by a softmax over all of them.

DeepSeek-AI, "DeepSeek-V2" (2024), arXiv 2405.04434; transformers' modeling_deepseek_v2.py. Queries
of V2 Lite have no latent.
"""

from __future__ import annotations

from typing import Any

from sdk.kernels.operators.route_rule import RouteRule
from sdk.models.architecture import Architecture, ConfigRules, GgufKeys, GgufRules, LayerRules
from sdk.models.architectures.deepseek_v3 import GGUF_KEYS, read_deepseek2
from sdk.models.architectures.glm4_moe import V3_KEYS
from sdk.models.configs.latent import LATENT_KEYS, latent_of
from sdk.quant.errors import UnsupportedError

_METHODS = ("greedy", "group_limited_greedy")


def _derived(config: dict[str, Any]) -> None:
    """Groups count only with the method that limits experts to some of them.

    :raises UnsupportedError: another method.
    """
    method = config.get("topk_method") or "greedy"
    if method not in _METHODS:
        raise UnsupportedError(
            f"config: topk_method: expected one of {', '.join(_METHODS)}, found {str(method)[:80]}"
        )
    if method == "greedy":
        config["n_group"] = config["topk_group"] = 1


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    read_deepseek2(config, keys)
    config["topk_method"] = "group_limited_greedy" if config.get("n_group", 1) > 1 else "greedy"


ARCHITECTURE = Architecture(
    "deepseek_v2",
    layer=LayerRules(route=RouteRule("softmax", normalized=False, group_best=1)),
    config=ConfigRules(
        keys=(*LATENT_KEYS, *V3_KEYS, "num_experts", "first_k_dense_replace", "mlp_bias"),
        ignored=(
            *("topk_method", "num_nextn_predict_layers", "qk_head_dim", "ep_size", "seq_aux"),
            *("aux_loss_alpha", "moe_layer_freq"),
        ),
        defaults={
            "norm_topk_prob": False,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "rms_norm_eps": 1e-6,
        },
        fixed={
            "scoring_func": "softmax",
            "norm_topk_prob": False,
            "rope_interleave": True,
        },
        derived=_derived,
        expert_width="moe_intermediate_size",
        latent=latent_of,
    ),
    more_gguf=(GgufRules("deepseek2", read=_read_gguf, keys=GGUF_KEYS, yarn_log_multiplier=True),),
)
