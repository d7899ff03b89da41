"""PLaMo 2: Mamba with heads in every second layer, attention in the others, norms around blocks.

Preferred Networks, "PLaMo 2 Technical Report" (2025); llama.cpp's plamo2.cpp. Folders need the code
beside their weights, which is not run; they store norms minus a number of their own each, GGUF
files have whole ones.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    NORMS_AROUND,
    RECURRENT,
    Architecture,
    Biases,
    Blocks,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
)
from sdk.models.architectures.mamba import GGUF_KEYS, GGUF_TENSORS
from sdk.models.configs.fields import MAX_WIDTH, Fields
from sdk.models.mixers.mamba import MambaSpec

_MAMBA, _ATTENTION = "linear_attention", "full_attention"
_SIZES = ("mamba_num_heads", "mamba_head_dim", "mamba_d_state", "mamba_d_conv")


def _recurrent(fields: Fields) -> MambaSpec | None:
    if _MAMBA not in fields.values.get("layer_types", ()):
        return None
    hidden = fields.count("hidden_size", MAX_WIDTH)
    heads, dim = (fields.count(name, MAX_WIDTH) for name in _SIZES[:2])
    return MambaSpec(
        heads * dim,
        fields.count("mamba_d_state", 512),
        fields.count("mamba_d_conv", 16),
        max(64, hidden // 16),
        conv_bias=False,
        norms="weighted",
        heads=heads,
    )


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """Layers without key/value heads are Mamba's."""
    heads = keys.integer("ssm.time_step_rank", (1, MAX_WIDTH))
    inner = keys.integer("ssm.inner_size", (heads, MAX_WIDTH))
    if inner % heads:
        raise keys.fail("ssm.inner_size", inner, f"a multiple of {heads} heads")
    if groups := keys.integer("ssm.group_count", (0, MAX_WIDTH), 0):
        raise keys.fail("ssm.group_count", groups, "0")
    config["mamba_num_heads"], config["mamba_head_dim"] = heads, inner // heads
    config["mamba_d_state"] = keys.integer("ssm.state_size", (1, 512))
    config["mamba_d_conv"] = keys.integer("ssm.conv_kernel", (2, 16))
    attends = keys.present("attention.head_count_kv", config["num_hidden_layers"])
    config["layer_types"] = [_ATTENTION if one else _MAMBA for one in attends]


ARCHITECTURE = Architecture(
    "plamo2",
    layer=LayerRules(norms=NORMS_AROUND, qk_norm="each_head"),
    config=ConfigRules(
        keys=("layer_types", *_SIZES),
        biases=lambda fields: Biases(),
        kinds={_MAMBA: RECURRENT, _ATTENTION: Blocks()},
        recurrent=_recurrent,
    ),
    more_gguf=(
        GgufRules(
            "plamo2",
            tensors={
                **GGUF_TENSORS,
                "mamba.dt_layernorm.weight": "ssm_dt_norm",
                "mamba.b_layernorm.weight": "ssm_b_norm",
                "mamba.c_layernorm.weight": "ssm_c_norm",
                "mlp.gate_up_proj": "ffn_up",
                "pre_feedforward_layernorm": "ffn_norm",
                "post_attention_layernorm.weight": "post_attention_norm",
                "post_feedforward_layernorm.weight": "post_ffw_norm",
            },
            read=_read_gguf,
            keys=(*GGUF_KEYS, "ssm.group_count"),
        ),
    ),
    folders=False,
)
