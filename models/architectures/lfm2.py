"""LFM2 and LFM2.5: gated short convolutions, and attention in a few layers.

Liquid AI, "LFM2 Technical Report" (2025), arXiv 2511.23404; transformers' modeling_lfm2.py.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    RECURRENT,
    Architecture,
    Biases,
    Blocks,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    TensorRules,
)
from sdk.models.configs.fields import MAX_WIDTH, Fields
from sdk.models.mixers.short_conv import ShortConvSpec

#: What the width of MLPs follows from.
_WIDTH_KEYS = ("block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of")
KEYS = ("layer_types", "conv_L_cache", "conv_bias")
#: Keys that published configs spell differently, ours to theirs.
SPELLINGS = {"tie_word_embeddings": "tie_embedding"}
KINDS = {"conv": RECURRENT, "full_attention": Blocks()}
DEFAULTS = {"conv_L_cache": 3, "norm_eps": 1e-5, "rope_theta": 1_000_000.0}
#: Names of tensors of a layer, and of the last norm.
NAMES = {
    "model.norm": "model.embedding_norm",
    "input_layernorm": "operator_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "self_attn.q_layernorm",
    "self_attn.k_norm": "self_attn.k_layernorm",
    "self_attn.o_proj": "self_attn.out_proj",
}
#: The same in GGUF files.
GGUF_TENSORS = {
    "conv.in_proj": "shortconv.in_proj",
    "conv.out_proj": "shortconv.out_proj",
    "conv.conv": "shortconv.conv",
}


def recurrent(fields: Fields) -> ShortConvSpec:
    """The sizes of its convolutions."""
    taps = fields.count("conv_L_cache", 16)
    if taps < 2:
        fields.fail("conv_L_cache", "at least 2 tokens", taps)
    width = fields.count("hidden_size", MAX_WIDTH)
    return ShortConvSpec(width, taps, fields.flag("conv_bias", default=False))


def read_kinds(config: dict[str, Any], keys: GgufKeys) -> None:
    """Layers without key/value heads are convolutions."""
    attends = keys.present("attention.head_count_kv", config["num_hidden_layers"])
    config["layer_types"] = ["full_attention" if one else "conv" for one in attends]
    config["conv_L_cache"] = keys.integer("shortconv.l_cache", (2, 16))
    config["use_qk_norm"] = True


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    read_kinds(config, keys)
    config["block_auto_adjust_ff_dim"] = False


def _derived(config: dict[str, Any]) -> None:
    """The kinds of layers of older configs, and the width of MLPs."""
    layers, attend = config.get("num_hidden_layers"), config.get("full_attn_idxs")
    if config.get("layer_types") is None and isinstance(layers, int):
        attends = [attend is None or i in attend for i in range(layers)]
        config["layer_types"] = ["full_attention" if one else "conv" for one in attends]
    width = config.get("intermediate_size")
    if not isinstance(width, int) or config.get("block_auto_adjust_ff_dim") is False:
        config["mlp_width"] = width
        return
    width, multiple = 2 * width // 3, config.get("block_multiple_of", 256)
    if (factor := config.get("block_ffn_dim_multiplier", 1.0)) is not None:
        width = int(factor * width)
        width = -(-width // multiple) * multiple
    config["mlp_width"] = width


ARCHITECTURE = Architecture(
    "lfm2",
    layer=LayerRules(qk_norm="head"),
    config=ConfigRules(
        keys=(*KEYS, *_WIDTH_KEYS, "mlp_width", "full_attn_idxs"),
        ignored=("block_ff_dim", "block_dim", "block_use_swiglu", "block_use_xavier_init"),
        defaults=DEFAULTS,
        norm_eps="norm_eps",
        dense_width="mlp_width",
        names={**SPELLINGS, "intermediate_size": "block_ff_dim"},
        derived=_derived,
        biases=lambda fields: Biases(),
        activation=lambda fields: "silu",
        kinds=KINDS,
        recurrent=recurrent,
    ),
    tensors=TensorRules(
        names={
            **NAMES,
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
        }
    ),
    more_gguf=(
        GgufRules(
            "lfm2",
            tensors={**GGUF_TENSORS, "model.norm": "token_embd_norm"},
            read=_read_gguf,
            keys=("shortconv.l_cache",),
        ),
    ),
)
