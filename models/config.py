"""What the library needs to know of a decoder, read once from the checkpoint's config and checked.

Published configs come in several dialects: transformers 4 (``rope_theta``, ``rope_scaling``),
transformers 5 (``rope_parameters``, possibly one per layer type; ``layer_types``), and what the
GGUF loader makes of metadata. Only :meth:`ModelConfig.from_dict` knows them; what differs between
models comes from their :class:`~sdk.models.architecture.ConfigRules`. An impossible value is
rejected by name before anything is allocated from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.kernels.dataclass import dataclass
from sdk.kernels.head_norms import QueryScale
from sdk.kernels.mlp_activations import Activation
from sdk.models.architecture import Alibi, Architecture, Biases, ConfigRules, architecture
from sdk.models.config_fields import (
    MAX_EXPERTS,
    MAX_LAYERS,
    MAX_POSITION,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
    activation_named,
    without_null,
)
from sdk.models.config_keys import check_fixed, check_fixed_by_model, only_read, with_our_keys
from sdk.models.rope import RopeSpec
from sdk.models.rope_config import ropes_of_layers
from sdk.models.sliding import sliding_windows
from sdk.quant.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class ExpertSpec:
    """A mixture of ``count`` experts of ``width`` features, of which a token uses ``per_token``.

    ``normalized``: the weights of a token's experts sum to 1. ``layers``: which have experts; the
    others have an ordinary MLP of ``ModelConfig.intermediate_size``.
    """

    count: int
    per_token: int
    width: int
    normalized: bool
    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder, normalized. Sizes count features or tokens.

    ``sliding_windows``: for every layer how many tokens a token sees, itself included, ``None`` for
    all. ``ropes``: the rotary embeddings, that of layers without a window first, of which a layer
    has the one with the number in ``rope_of_layer``.
    ``attention_bias``: of q, k and v; ``output_bias``: of the projection after attention.
    ``query_scale``: of queries by their positions. ``post_norm_eps``: that of the norms after
    blocks, if it differs from ``norm_eps``.
    ``parallel_blocks``: attention and MLP of a layer read the same sum. ``one_norm``: whatever the
    architecture says otherwise, they read one norm of it.
    ``alibi``: the linear biases of attention.
    ``qk_norm``: queries and keys have the norms that the architecture has for them.
    ``head_bias``: of the projection to logits. ``qkv_clip``: queries, keys and values are clamped
    to this size.
    ``logits_scale`` divides the logits; a softcap ``c`` turns ``x`` into ``c * tanh(x / c)``.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: Activation
    max_position: int
    ropes: tuple[RopeSpec, ...]
    rope_of_layer: tuple[int, ...]
    sliding_windows: tuple[int | None, ...]
    attention_scale: float
    attention_softcap: float | None
    final_softcap: float | None
    embedding_scale: float
    residual_scale: float
    logits_scale: float
    attention_bias: bool
    output_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    experts: ExpertSpec | None = None
    query_scale: QueryScale | None = None
    post_norm_eps: float | None = None
    parallel_blocks: bool = False
    qk_norm: bool = True
    head_bias: bool = False
    qkv_clip: float | None = None
    alibi: Alibi | None = None
    one_norm: bool = False

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face config of transformers 4 or 5, or the one made from a GGUF file.

        Of a multimodal config, the text model is read.

        :raises CheckpointError: names the field, what was expected and what was found.
        :raises UnsupportedError: a rotary scaling, activation or layer type we do not have.
        """
        text = config.get("text_config")
        if isinstance(text, Mapping):
            return cls.from_dict({**_outer_facts(config), **text})
        model_type = Fields(config).text("model_type")
        known = architecture(model_type)
        rules = ConfigRules() if known is None else known.config
        config = with_our_keys(config)
        check_fixed(config, "config")
        if known is not None:
            check_fixed_by_model(config, known)
        fields = Fields({**rules.defaults, **without_null(only_read(config, known))})
        hidden = fields.count("hidden_size", MAX_WIDTH)
        heads = fields.count("num_attention_heads", MAX_WIDTH)
        kv_heads = fields.count("num_key_value_heads", MAX_WIDTH, default=heads)
        if heads % kv_heads:
            fields.fail("num_key_value_heads", f"a divisor of {heads} heads", kv_heads)
        if not fields.has("head_dim") and hidden % heads:
            fields.fail("num_attention_heads", f"a divisor of hidden_size {hidden}", heads)
        head_dim = fields.count("head_dim", 4096, default=hidden // heads)
        layers = fields.count("num_hidden_layers", MAX_LAYERS)
        eps = rules.norm_eps
        biases = (rules.biases or _biases)(fields)
        windows = _windows(config, fields, known, layers)
        unrotated = rules.unrotated and rules.unrotated(fields, windows)
        ropes, rope_of_layer = ropes_of_layers(fields, head_dim, windows, unrotated, rules.rotation)
        return cls(
            model_type=model_type if known is None else known.model_type,
            vocab_size=fields.count("vocab_size", MAX_VOCAB),
            hidden_size=hidden,
            intermediate_size=fields.count("intermediate_size", MAX_WIDTH),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=eps if isinstance(eps, float) else fields.positive(eps),
            activation=(rules.activation or _activation)(fields),
            max_position=fields.count("max_position_embeddings", MAX_POSITION),
            ropes=ropes,
            rope_of_layer=rope_of_layer,
            sliding_windows=windows,
            **_factors(fields, rules, hidden, head_dim),
            attention_bias=biases.qkv,
            output_bias=biases.output,
            mlp_bias=biases.mlp,
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
            experts=_experts(fields, rules, layers),
            post_norm_eps=fields.optional_positive("post_norm_eps"),
            query_scale=None if rules.query_scale is None else rules.query_scale(fields),
            parallel_blocks=bool(rules.parallel_blocks and rules.parallel_blocks(fields)),
            qk_norm=rules.qk_norm is None or rules.qk_norm(fields),
            head_bias=biases.head,
            alibi=None if rules.alibi is None else rules.alibi(fields),
            one_norm=bool(rules.one_norm and rules.one_norm(fields)),
        )


def _factors(fields: Fields, rules: ConfigRules, hidden: int, head_dim: int) -> dict[str, Any]:
    """Multipliers, soft caps and the clamp of a model."""
    scale = fields.positive("query_pre_attn_scalar", default=float(head_dim)) ** -0.5
    embedding_scale = 1.0 if rules.embedding_scale is None else rules.embedding_scale(hidden)
    return {
        "attention_scale": fields.positive("attention_multiplier", default=scale)
        * fields.positive("qk_scale_factor", default=1.0),
        "attention_softcap": fields.optional_positive("attn_logit_softcapping"),
        "final_softcap": fields.optional_positive("final_logit_softcapping"),
        "embedding_scale": fields.positive("embedding_multiplier", default=embedding_scale),
        "residual_scale": fields.positive("residual_multiplier", default=1.0),
        "logits_scale": fields.positive("logits_scaling", default=1.0)
        / fields.positive("logit_scale", default=1.0)
        / fields.positive("output_multiplier", default=1.0),
        "qkv_clip": fields.optional_positive("clip_qkv"),
    }


def _biases(fields: Fields) -> Biases:
    attention = fields.flag("attention_bias", default=False)
    return Biases(attention, attention, fields.flag("mlp_bias", default=False))


def _windows(
    config: Mapping[str, Any], fields: Fields, own: Architecture | None, layers: int
) -> tuple[int | None, ...]:
    """The sliding windows. transformers' class of some models does not read ``layer_types``: then
    they must say what it does anyway, because vLLM and others do read them."""
    rule = ConfigRules().sliding if own is None else own.config.sliding
    windows = sliding_windows(fields, layers, rule)
    kinds = config.get("layer_types")
    if own is not None and kinds is not None and "layer_types" not in own.config.keys:
        stated = {"layer_types": kinds, "sliding_window": config.get("sliding_window")}
        found = sliding_windows(Fields(without_null(stated)), layers, rule)
        if found != windows:
            index = next(i for i in range(layers) if found[i] != windows[i])
            raise UnsupportedError(
                f"config: layer_types[{index}]: found {kinds[index]!r}, but transformers' "
                f"{own.model_type} does not read layer_types: expected "
                f"{'full' if windows[index] is None else 'sliding'}_attention"
            )
    return windows


def _outer_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a multimodal config has outside its text part."""
    keys = ("model_type", "tie_word_embeddings")
    return {key: config[key] for key in keys if config.get(key) is not None}


def _experts(fields: Fields, rules: ConfigRules, layers: int) -> ExpertSpec | None:
    if rules.expert_width is None:
        return None
    name = "num_experts" if fields.has("num_experts") else "num_local_experts"
    count = fields.count(name, MAX_EXPERTS)
    step = fields.count("decoder_sparse_step", MAX_LAYERS, default=1)
    dense = fields.values.get("mlp_only_layers", ())
    if not isinstance(dense, (list, tuple)):
        fields.fail("mlp_only_layers", "a list of layers", dense)
    return ExpertSpec(
        count=count,
        per_token=fields.count("num_experts_per_tok", count),
        width=fields.count(rules.expert_width, MAX_WIDTH),
        normalized=fields.flag("norm_topk_prob", default=True),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    )


def _activation(fields: Fields) -> Activation:
    names = ("hidden_activation", "hidden_act")
    name = next((n for n in names if fields.has(n)), "hidden_act")
    return activation_named(fields.text(name, default="silu"), name)
