"""The encoder of T5: norms before blocks, no positions, biases by the distance of a key.

Raffel et al., "Exploring the Limits of Transfer Learning" (2019), arXiv 1910.10683; transformers'
modeling_t5.py. sentence-t5 and GTR are such encoders. Scores are not scaled, and the
first layer has the table of biases of all. The decoder of a whole T5 does not run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdk.models.architecture import (
    Architecture,
    Biases,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    TensorRules,
)
from sdk.models.architectures.bert import no_rotation
from sdk.models.configs.fields import activation_named
from sdk.models.configs.score_biases import DistanceBuckets
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from sdk.kernels.operators.mlp_activations import Activation
    from sdk.models.configs.fields import Fields

_GATED = "gated-"
_BUCKETS, _FARTHEST = "relative_attention_num_buckets", "relative_attention_max_distance"
#: llama.cpp's `relative_position_bucket` has no other number.
_GGUF_FARTHEST = 128
#: Biases reach as far as a text does, so a config has no limit. A plan counts a whole prompt; this
#: is eight times the length that these models were trained with.
_MOST_TOKENS = 4096
_HEADS = ("Classification", "QuestionAnswering")


def is_gated(config: dict[str, Any]) -> bool:
    """Whether the MLP has a gate."""
    return str(config.get("feed_forward_proj")).startswith(_GATED)


def derived(config: dict[str, Any]) -> None:
    """What a config of T5 does not say.

    :raises UnsupportedError: the model has a head of classes.
    """
    names = config.get("architectures")
    for name in names if isinstance(names, list) else ():
        if str(name).endswith(_HEADS):
            raise UnsupportedError(
                f"config: architectures: expected T5EncoderModel, found {str(name)[:80]!r}: of T5 "
                "the encoder runs, for vectors, without a head of classes"
            )
    config["num_key_value_heads"] = config.get("num_attention_heads")
    config["tie_word_embeddings"] = True
    config.setdefault("rope_theta", 10000.0)
    config.setdefault("eos_token_id", None)
    config.setdefault("max_position_embeddings", _MOST_TOKENS)


def activation(fields: Fields) -> Activation:
    """ "gated-gelu" is the approximation of GELU by tanh, as in transformers."""
    key = "feed_forward_proj"
    found = fields.text(key, default="relu")
    name = found.removeprefix(_GATED)
    return activation_named("gelu_new" if found == "gated-gelu" else name, key)


def buckets(fields: Fields, table: str | None) -> DistanceBuckets:
    """The biases; an odd number of buckets cannot be halved, and each half has exact ones."""
    number = fields.count(_BUCKETS, 1024, default=32)
    farthest = fields.count(_FARTHEST, 1 << 16, default=128)
    if number % 4:
        fields.fail(_BUCKETS, "a multiple of 4", number)
    if farthest <= number // 4:
        fields.fail(_FARTHEST, f"more than {number // 4}, a quarter of {_BUCKETS}", farthest)
    return DistanceBuckets(number, farthest, table)


def read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config[_BUCKETS] = keys.integer("attention.relative_buckets_count", (4, 1024))
    config[_FARTHEST] = _GGUF_FARTHEST
    gated = keys.has_tensor("enc.blk.0.ffn_gate.weight")
    config["feed_forward_proj"] = "gated-gelu" if gated else "relu"


CONFIG = ConfigRules(
    keys=("feed_forward_proj", "is_encoder_decoder", _BUCKETS, _FARTHEST),
    ignored=(
        *("dropout_rate", "initializer_factor", "num_decoder_layers", "n_positions"),
        *("output_past", "dense_act_fn", "is_gated_act", "scale_decoder_outputs"),
    ),
    defaults={"layer_norm_epsilon": 1e-6, "feed_forward_proj": "relu"},
    stated=("feed_forward_proj", _BUCKETS),
    names={
        "hidden_size": "d_model",
        "head_dim": "d_kv",
        "intermediate_size": "d_ff",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
    },
    unrotated=no_rotation,
    biases=lambda fields: Biases(),
    activation=activation,
    causal=False,
    norm_eps="layer_norm_epsilon",
    attention_scale=1.0,
    derived=derived,
    buckets=lambda fields: buckets(fields, "model.layers.0.self_attn.distance_biases"),
)
NAMES: Mapping[str, str | tuple[str, ...]] = {
    "model.layers": "encoder.block",
    "model.embed_tokens": ("shared", "encoder.embed_tokens", "decoder.embed_tokens"),
    "model.norm": "encoder.final_layer_norm",
    "self_attn.q_proj": "layer.0.SelfAttention.q",
    "self_attn.k_proj": "layer.0.SelfAttention.k",
    "self_attn.v_proj": "layer.0.SelfAttention.v",
    "self_attn.o_proj": "layer.0.SelfAttention.o",
    "self_attn.distance_biases": "layer.0.SelfAttention.relative_attention_bias",
    "input_layernorm": "layer.0.layer_norm",
    "mlp.down_proj": "layer.1.DenseReluDense.wo",
    "post_attention_layernorm": "layer.1.layer_norm",
}
GGUF = GgufRules(
    "t5encoder",
    tensors={
        "model.norm": "enc.output_norm",
        "self_attn.o_proj": "attn_o",
        "self_attn.distance_biases": "attn_rel_b",
    },
    read=read_gguf,
    keys=("attention.relative_buckets_count", "attention.layer_norm_epsilon"),
    layers="enc.blk",
)

#: A whole T5, of which the encoder runs.
WHOLE = GGUF._replace(
    name="t5",
    ignored=("decoder_block_count", "decoder_start_token_id"),
)

ARCHITECTURE = Architecture(
    "t5",
    aliases=("mt5",),
    layer=LayerRules(gated=False),
    config=CONFIG,
    tensors=TensorRules(names={**NAMES, "mlp.up_proj": "layer.1.DenseReluDense.wi"}),
    gguf=GGUF,
    more_gguf=(WHOLE,),
    wide_range=True,
)
