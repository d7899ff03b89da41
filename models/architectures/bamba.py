"""Bamba: Mamba-2 in most layers, attention of which half of each head turns in some, and MLPs.

IBM, "Bamba" (2024); transformers' modeling_bamba.py. llama.cpp's converter calls its files
``granitehybrid``.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import RECURRENT, Architecture, Blocks, ConfigRules, TensorRules
from sdk.models.architectures.granitemoehybrid import derive_head, recurrent
from sdk.models.architectures.mamba2 import IGNORED, SIZES

_MAMBA, _ATTENTION = "linear_attention", "full_attention"


def _derived(config: dict[str, Any]) -> None:
    """Which layers attend. Half of each head turns, whatever a file says."""
    layers, attend = config.get("num_hidden_layers"), config.get("attn_layer_indices") or ()
    if isinstance(layers, int) and isinstance(attend, (list, tuple)):
        kinds = [_ATTENTION if layer in attend else _MAMBA for layer in range(layers)]
        config["layer_types"] = kinds
    config["partial_rotary_factor"] = 0.5
    derive_head(config)


ARCHITECTURE = Architecture(
    "bamba",
    config=ConfigRules(
        keys=(
            *("attention_bias", "mlp_bias", "layer_types", "attn_layer_indices"),
            *("mamba_proj_bias", "time_step_limit", "partial_rotary_factor", *SIZES.values()),
        ),
        ignored=(
            *IGNORED,
            *("mamba_expand", "num_logits_to_keep", "z_loss_coefficient", "layers_block_type"),
            *("attn_rotary_emb", "mamba_use_mlp"),
        ),
        defaults={
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
        },
        fixed={"hidden_act": "silu"},
        derived=_derived,
        kinds={_MAMBA: RECURRENT, _ATTENTION: Blocks()},
        recurrent=recurrent,
    ),
    tensors=TensorRules(
        names={
            "model.norm": "model.final_layernorm",
            "post_attention_layernorm": "pre_ff_layernorm",
            "mlp": "feed_forward",
        }
    ),
)
