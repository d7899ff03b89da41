"""RWKV-7: recurrent layers of time mixing, and MLPs that read the token before, too.

Peng et al., "RWKV-7 Goose with Expressive Dynamic State Evolution" (2025), arXiv 2503.14456.
Folders are those of flash-linear-attention (fla-hub/rwkv7-*); llama.cpp's rwkv7.cpp.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    LAYER_NORM,
    RECURRENT,
    Architecture,
    Biases,
    ConfigRules,
    EmbeddingRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    TensorRules,
)
from sdk.models.configs.fields import MAX_WIDTH, Fields
from sdk.models.mixers.rwkv import RwkvSpec

#: The features of low rank: ours, the key of a config, that of a GGUF file; and what a config
#: without the key means: a power of the hidden size and a factor, in steps of 32.
RANKS = {
    "decay": ("decay_low_rank_dim", "attention.decay_lora_rank", 0.5, 1.8),
    "rate": ("a_low_rank_dim", "attention.iclr_lora_rank", 0.5, 1.8),
    "mix": ("v_low_rank_dim", "attention.value_residual_mix_lora_rank", 0.5, 1.3),
    "gate": ("gate_low_rank_dim", "attention.gate_lora_rank", 0.8, 0.6),
}
GGUF_KEYS = ("wkv.head_size", "token_shift_count", *(key for _, key, *_ in RANKS.values()))
#: llama.cpp's eps of the norm of heads.
_HEAD_EPS = 64e-5
_BOTH = {"w": "decay", "a": "rate", "v": "mix", "g": "gate"}
GGUF_TENSORS = {
    "rwkv.shift": "time_mix_lerp_fused",
    "rwkv.r_proj": "time_mix_receptance",
    "rwkv.k_proj": "time_mix_key",
    "rwkv.v_proj": "time_mix_value",
    "rwkv.o_proj": "time_mix_output",
    "rwkv.key_norm": "time_mix_k_k",
    "rwkv.key_mix": "time_mix_k_a",
    "rwkv.key_read": "time_mix_r_k",
    "rwkv.norm": "time_mix_ln",
    **{f"rwkv.{one}_in": f"time_mix_{one}1" for one in _BOTH},
    **{f"rwkv.{one}_out": f"time_mix_{one}2" for one in _BOTH},
    **{f"rwkv.{one}_out.bias": f"time_mix_{one}0.weight" for one in "wav"},
}


def spec_of(fields: Fields, norm_eps: float | None, *, shifts_mlp: bool = True) -> RwkvSpec:
    """The sizes of time mixing."""
    hidden, dim = fields.count("hidden_size", MAX_WIDTH), fields.count("head_dim", 512)
    if hidden % dim:
        fields.fail("head_dim", f"a divisor of hidden_size {hidden}", dim)
    gated = shifts_mlp or fields.flag("wkv_has_gate", default=True)
    ranks = {
        name: fields.count(key, MAX_WIDTH, default=max(1, round(hidden**power * factor / 32)) * 32)
        for name, (key, _, power, factor) in RANKS.items()
        if gated or name != "gate"
    }
    return RwkvSpec(
        hidden // dim,
        dim,
        decay=ranks["decay"],
        rate=ranks["rate"],
        mix=ranks["mix"],
        gate=ranks.get("gate", 0),
        norm_eps=norm_eps,
        shifts_mlp=shifts_mlp,
    )


def _recurrent(fields: Fields) -> RwkvSpec:
    own = fields.count("head_dim", 512) * fields.positive("norm_eps", default=1e-5)
    return spec_of(fields, fields.positive("head_norm_eps", default=own))


def derived(config: dict[str, Any]) -> None:
    """What a model without attention does not have, so that sizes of it exist."""
    hidden, layers = config.get("hidden_size"), config.get("num_hidden_layers")
    dim = config.setdefault("head_dim", 64)
    if isinstance(hidden, int) and isinstance(dim, int):
        heads = max(1, hidden // max(dim, 1))
        config["num_attention_heads"] = config["num_key_value_heads"] = heads
        if config.get("intermediate_size") is None:
            ratio = config.get("hidden_ratio") or 4
            config["intermediate_size"] = 32 * -(-int(hidden * ratio) // 32)
    if isinstance(layers, int):
        config["layer_types"] = ["linear_attention"] * layers


def read_sizes(config: dict[str, Any], keys: GgufKeys) -> None:
    """The sizes of time mixing in a GGUF file, as a config has them."""
    hidden = config["hidden_size"]
    config["head_dim"] = keys.integer("wkv.head_size", (1, 512))
    config["num_attention_heads"] = config["num_key_value_heads"] = hidden // config["head_dim"]
    for name, (key, theirs, *_) in RANKS.items():
        least = 0 if name == "gate" else 1
        config[key] = keys.integer(theirs, (least, MAX_WIDTH), 0 if name == "gate" else None)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    read_sizes(config, keys)
    shifts = keys.integer("token_shift_count", (0, 2), 2)
    if shifts != 2:
        raise keys.fail("token_shift_count", shifts, "2")
    config["hidden_act"] = "sqrelu"
    config["head_norm_eps"] = _HEAD_EPS


CONFIG = ConfigRules(
    keys=("head_dim", "layer_types", "head_norm_eps", *(key for key, *_ in RANKS.values())),
    ignored=(
        *("attn_mode", "hidden_ratio", "fuse_norm", "fuse_cross_entropy", "use_l2warp"),
        *("fuse_linear_cross_entropy", "num_heads", "value_dim", "expand_ratio", "use_cache"),
    ),
    defaults={"max_position_embeddings": 1 << 20, "norm_eps": 1e-5, "hidden_act": "sqrelu"},
    fixed={"attn": None, "norm_first": True, "norm_bias": True, "hidden_act": "sqrelu"},
    activation=lambda fields: "relu2",
    norm_eps="norm_eps",
    derived=derived,
    biases=lambda fields: Biases(),
    unrotated=lambda fields, windows: [True] * len(windows),
    kinds={"linear_attention": RECURRENT},
    recurrent=_recurrent,
)
ARCHITECTURE = Architecture(
    "rwkv7",
    layer=LayerRules(norm=LAYER_NORM, gated=False, shifted_mlp=True, value_residual=True),
    config=CONFIG,
    tensors=TensorRules(
        names={
            "model.embed_tokens": "model.embeddings",
            "model.embed_norm": "model.layers.0.pre_norm",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            "mlp.shift": "ffn.x_k",
            "mlp.up_proj": "ffn.key",
            "mlp.down_proj": "ffn.value",
            "rwkv.shift": "attn.x_x",
            **{f"rwkv.shift_{one}": f"attn.x_{one}" for one in "rwkvag"},
            **{f"rwkv.{one}_proj": f"attn.{one}_proj" for one in "rkvo"},
            **{f"rwkv.{one}_in": f"attn.{one}_lora.lora.0" for one in _BOTH},
            **{f"rwkv.{one}_out": f"attn.{one}_lora.lora.2" for one in _BOTH},
            "rwkv.key_norm": "attn.k_k",
            "rwkv.key_mix": "attn.k_a",
            "rwkv.key_read": "attn.r_k",
            "rwkv.norm": "attn.g_norm",
        }
    ),
    embedding=EmbeddingRules(norm=True),
    more_gguf=(
        GgufRules(
            "rwkv7",
            tensors={
                **GGUF_TENSORS,
                "post_attention_layernorm": "attn_norm_2",
                "mlp.shift": "channel_mix_lerp_k",
                "mlp.up_proj": "channel_mix_key",
                "mlp.down_proj": "channel_mix_value",
            },
            read=_read_gguf,
            keys=GGUF_KEYS,
        ),
    ),
)
