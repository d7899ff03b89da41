"""Hunyuan 0.5B to 7B: Llama that normalizes the heads of queries and keys after the rotation.

transformers' modeling_hunyuan_v1_dense.py. Contexts were extended by a larger rotary base: the
published configs call that ``dynamic``, with a fixed ``alpha`` in place of a length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.models.architecture import Architecture, ConfigRules, GgufRules, LayerRules, TensorRules
from sdk.models.configs.fields import Fields


def ntk_alpha(parameters: Mapping[str, Any], head_dim: int) -> Mapping[str, Any]:
    """``dynamic`` with an ``alpha`` is a plain rotation with another base, also of Hunyuan MoE;
    ``xdrope`` is the same with the positions of images."""
    kind = parameters.get("rope_type") or parameters.get("type")
    if kind not in ("dynamic", "xdrope") or not parameters.get("alpha"):
        return parameters
    given = Fields(parameters, "config: rope")
    stretch = given.positive("alpha") ** (head_dim / max(head_dim - 2, 1))
    return {"rope_type": "default", "rope_theta": given.positive("rope_theta") * stretch}


ARCHITECTURE = Architecture(
    "hunyuan_v1_dense",
    layer=LayerRules(
        qk_norm="head",
        norm_after_rotation=True,
    ),
    config=ConfigRules(
        keys=("attention_bias",),
        ignored=("eod_token_id", "cla_share_factor"),
        fixed={"use_qk_norm": True, "use_cla": False},  # options of the first code
        rotation=ntk_alpha,
    ),
    tensors=TensorRules(
        names={
            "self_attn.q_norm": "self_attn.query_layernorm",
            "self_attn.k_norm": "self_attn.key_layernorm",
        }
    ),
    gguf=GgufRules("hunyuan-dense"),
)
