"""Phi-3.5-MoE: LayerNorms with biases, and two experts that a sparse mixer weighs.

Abdin et al., "Phi-3 Technical Report" (2024); transformers' modeling_phimoe.py. Its long rotation
multiplies cos and sin by numbers of the config. In contexts longer than the original one we take
the long factors, as the model was trained; transformers 5.24 takes the short ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.kernels.operators.route_rule import RouteRule
from sdk.models.architecture import (
    LAYER_NORM,
    Architecture,
    Biases,
    ConfigRules,
    LayerRules,
    TensorRules,
)
from sdk.models.configs.fields import Fields
from sdk.models.configs.sliding import all_but_every
from sdk.quant.errors import UnsupportedError


def _biases(fields: Fields) -> Biases:
    attention = fields.flag("attention_bias", default=False)
    return Biases(attention, attention, head=fields.flag("lm_head_bias", default=False))


def _long(parameters: Mapping[str, Any], head_dim: int) -> Mapping[str, Any]:
    """transformers takes one of two factors by the length of a batch: they must be the same."""
    short, long = parameters.get("short_mscale"), parameters.get("long_mscale")
    if short is None and long is None:
        return parameters
    if short != long:
        raise UnsupportedError(
            f"config: rope: expected short_mscale and long_mscale to be equal, found {short} and "
            f"{long}: a factor that depends on the length of a batch is not supported"
        )
    return {**parameters, "attention_factor": long}


ARCHITECTURE = Architecture(
    "phimoe",
    layer=LayerRules(
        norm=LAYER_NORM,
        route=RouteRule("sparse_mixer", normalized=False, jitter=0.01),
    ),
    config=ConfigRules(
        keys=(
            *("attention_bias", "lm_head_bias", "num_local_experts", "num_experts"),
            *("router_jitter_noise", "sliding_window", "original_max_position_embeddings"),
        ),
        ignored=("input_jitter_noise",),  # of training
        defaults={"rope_theta": 1_000_000.0, "num_experts_per_tok": 2},
        fixed={"num_experts_per_tok": 2},  # the mixer chooses two, whatever a config says
        sliding=all_but_every(1),
        biases=_biases,
        rotation=_long,
        expert_width="intermediate_size",
    ),
    tensors=TensorRules(block_sparse_moe=True),
)
