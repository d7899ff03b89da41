"""DeepSeek V3 and R1, Kimi K2: latent attention, experts chosen by sigmoids with a bias in groups.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), arXiv 2412.19437; transformers'
modeling_deepseek_v3.py. Kimi K2 has the same code under another name. GGUF files call themselves
``deepseek2``, as those of V2 do, whose router has a softmax; those of GLM-4.7-Flash hold the same
computation.
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
from sdk.models.architectures.glm4_moe import V3_KEYS, V3_ROUTE
from sdk.models.configs.latent import LATENT_GGUF_KEYS, LATENT_KEYS, latent_of, read_latent
from sdk.quant.errors import UnsupportedError

#: Metadata of files of this family, besides those of all.
GGUF_KEYS = (*LATENT_GGUF_KEYS, "nextn_predict_layers")
#: Of configs, without an effect: layers that predict further tokens, which transformers does not
#: load, training, and names of the one way to do a thing.
IGNORED = (
    *("num_nextn_predict_layers", "num_mtp_layers", "qk_head_dim", "ep_size", "seq_aux"),
    *("aux_loss_alpha", "topk_method", "moe_layer_freq"),
)
_SIGMOID = 2


def read_deepseek2(config: dict[str, Any], keys: GgufKeys) -> None:
    """The widths of latent attention, and YaRN as llama.cpp reads it for ``deepseek2``: the file
    has a tenth of ``mscale_all_dim``, which is ``mscale`` too."""
    read_latent(config, keys)
    rope = config.get("rope_scaling")
    if not rope or rope.get("rope_type") != "yarn":
        return
    if not rope.get("mscale_all_dim"):
        raise UnsupportedError(
            f"{keys.source}: deepseek2.rope.scaling.yarn_log_multiplier: expected a number beside "
            "YaRN, found none: llama.cpp scales such a file in a way of its own"
        )
    every = round(10 * rope["mscale_all_dim"], 6)
    rope |= {"mscale": every, "mscale_all_dim": every}


def has_sigmoids(keys: GgufKeys) -> bool:
    """Whether the router of a ``deepseek2`` file has sigmoids; the first files of GLM-4.7-Flash
    do not say it, and llama.cpp knows them by their sizes."""
    gating = keys.integer("expert_gating_func", (0, 1 << 16), 0)
    flash = keys.rows("token_embd.weight") == 154880 and keys.get("block_count") in (47, 48)
    return keys.expert_count > 0 and (gating == _SIGMOID or (gating == 0 and flash))


ARCHITECTURE = Architecture(
    "deepseek_v3",
    aliases=("kimi_k2",),
    layer=LayerRules(route=V3_ROUTE, route_bias=True),
    config=ConfigRules(
        keys=(*LATENT_KEYS, *V3_KEYS, "num_local_experts", "first_k_dense_replace"),
        ignored=IGNORED,
        defaults={
            "n_group": 8,
            "topk_group": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "rms_norm_eps": 1e-6,
        },
        fixed={"scoring_func": "sigmoid"},
        expert_width="moe_intermediate_size",
        latent=latent_of,
    ),
    more_gguf=(
        GgufRules(
            "deepseek2",
            matches=has_sigmoids,
            read=read_deepseek2,
            expert_gating=_SIGMOID,
            keys=GGUF_KEYS,
            yarn_log_multiplier=True,
        ),
    ),
    next_token=NextTokenRules(),
)
