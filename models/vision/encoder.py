"""The layers of a tower, as a config of the models that run them."""

from __future__ import annotations

from sdk.models.config import ModelConfig
from sdk.models.config_fields import MAX_LAYERS, MAX_WIDTH, Fields, activation_named
from sdk.models.rope import RopeSpec
from sdk.models.vision.config import MAX_SIDE

QUICK_GELU = 1.702


def encoder_config(
    fields: Fields,
    *,
    eps: float,
    activation: str,
    layers: int | None = None,
    heads: str = "num_attention_heads",
    depth: str = "num_hidden_layers",
    attention_bias: bool = True,
    output_bias: bool | None = None,
    mlp_bias: bool = True,
    rotary_dim: int | None = None,
    theta: float = 10000.0,
) -> ModelConfig:
    """The layers of a tower from its part of a config.

    ``layers``: how many of them run (default: all). ``heads``, ``depth``: keys of their numbers.
    ``rotary_dim``: how many features of a head turn; ``None``: positions are in what they read.

    :raises CheckpointError: names the field, what was expected and what was found.
    """
    hidden, count = fields.count("hidden_size", MAX_WIDTH), fields.count(heads, MAX_WIDTH)
    number = fields.count(depth, MAX_LAYERS)
    quick = activation == "quick_gelu"  # x * sigmoid(1.702 x)
    if hidden % count and not fields.has("head_dim"):
        fields.fail(heads, f"a divisor of hidden_size {hidden}", count)
    head_dim = fields.count("head_dim", 4096, default=hidden // count)
    turns = RopeSpec(theta, rotary_dim or 0, MAX_SIDE, "none" if rotary_dim is None else "default")
    return ModelConfig(
        model_type=fields.text("model_type"),
        vocab_size=1,
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size", MAX_WIDTH),
        num_layers=number if layers is None else layers,
        num_heads=count,
        num_kv_heads=count,
        head_dim=head_dim,
        norm_eps=eps,
        activation=activation_named("silu" if quick else activation, "hidden_act"),
        activation_slope=QUICK_GELU if quick else 1.0,
        max_position=MAX_SIDE,
        ropes=(turns,),
        rope_of_layer=(0,) * number,
        sliding_windows=(None,) * number,
        attention_scale=head_dim**-0.5,
        attention_softcap=None,
        final_softcap=None,
        embedding_scale=1.0,
        residual_scale=1.0,
        logits_scale=1.0,
        attention_bias=attention_bias,
        output_bias=attention_bias if output_bias is None else output_bias,
        mlp_bias=mlp_bias,
        down_bias=mlp_bias,
        tie_word_embeddings=True,
        causal=False,
    )
