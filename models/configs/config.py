"""What the library needs to know of a decoder, read once from the checkpoint's config and checked.

Published configs come in several dialects: transformers 4 (``rope_theta``, ``rope_scaling``),
transformers 5 (``rope_parameters``, possibly one per layer type; ``layer_types``), and what the
GGUF loader makes of metadata. Only :meth:`ModelConfig.from_dict` knows them; what differs between
models comes from their :class:`~sdk.models.architecture.ConfigRules`. An impossible value is
rejected by name before anything is allocated from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sdk.kernels.dataclass import dataclass
from sdk.kernels.operators.head_norms import QueryScale
from sdk.kernels.operators.mlp_activations import NUMBERS, Activation
from sdk.models.architecture import (
    Architecture,
    Biases,
    Blocks,
    ConfigRules,
    EmbeddingRules,
    LayerCaches,
    architecture,
)
from sdk.models.configs.attention import (
    attention_scale,
    head_dims,
    heads_of,
    is_causal,
    layer_caches,
    ropes_of,
    symmetric_windows,
    windows_of,
)
from sdk.models.configs.experts import ExpertSpec, experts_of
from sdk.models.configs.fields import (
    MAX_LAYERS,
    MAX_POSITION,
    MAX_VOCAB,
    MAX_WIDTH,
    Fields,
    sloped_activation,
    without_null,
)
from sdk.models.configs.keys import check_fixed, only_read, with_our_keys
from sdk.models.configs.latent_spec import LatentSpec
from sdk.models.configs.recurrent import RecurrentSpec
from sdk.models.configs.score_biases import Alibi, DistanceBuckets
from sdk.models.configs.sliding import chunked
from sdk.models.rope import RopeSpec
from sdk.models.vision.family import text_part, vision_of
from sdk.quant.caches import AttentionCache, Cache, window_groups
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from sdk.models.configs.stream_spec import StreamSpec
    from sdk.models.vision.config import VisionConfig
#: A gate is clamped after its activation, from above alone. SiLU is never below -0.2785: so far
#: from 0 a clamp from both sides is the same.
LEAST_LIMIT = 0.2785


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder, normalized. Sizes count features or tokens.

    ``sliding_windows``: for every layer how many tokens a token sees, itself included, ``None`` for
    all. ``ropes``: the rotary embeddings, that of layers without a window first, of which a layer
    has the one with the number in ``rope_of_layer``.
    ``attention_bias``: of q, k and v; ``output_bias``: of the projection after attention;
    ``mlp_bias``: of the MLP's; ``down_bias``: of its last one, whatever the others have.
    ``causal``: a token sees none after it. The tokens of other models (encoders) see as many after
    as before them; such a model has no head and does not continue a text.
    ``query_scale``: of queries by their positions. ``post_norm_eps``: that of the norms after
    blocks, if it differs from ``norm_eps``.
    ``parallel_blocks``: attention and MLP of a layer read the same sum. ``one_norm``: whatever the
    architecture says otherwise, they read one norm of it. ``post_norm``: layers are post-norm, see
    :class:`sdk.models.architecture.LayerRules`.
    ``qk_norm``: queries and keys have the norms that the architecture has for them.
    ``head_bias``: of the projection to logits. ``qkv_clip``: queries, keys and values are clamped
    to this size.
    ``first_position``: the row of position 0 in the table of learned positions; ``None``: there is
    none. ``token_types``: rows of the table of token types; 0: there is none. ``tasks``: rows of
    that of tasks, whose first one is added to every embedding; 0: there is none.
    ``embedding_size``: features of an embedding before its projection; ``None``: there is none.
    ``alibi``: the linear biases of attention. ``buckets``: those by buckets of distances.
    ``layer_heads``: the query heads of each layer, where layers differ; ``num_heads`` is the most
    of them. ``gate_per_head``: whether attention's gate has one number for each head; ``None``:
    the architecture says it. ``blocks``: of what each layer consists; empty: all attend and have an
    MLP. ``recurrent``: the sizes of the recurrent mixer of those that have one.
    ``attention_factor`` multiplies what attention adds; ``mlp_factors``: the gate of an MLP, and
    what that adds.
    ``layer_caches``: see :data:`sdk.models.architecture.LayerCaches`; empty: all layers have
    ``num_kv_heads`` heads of ``head_dim``, which are the most otherwise. ``keys_as_values``: the
    layers whose values are their keys before norm and rotation; empty: none. ``layer_widths``: the
    widths of MLPs where layers differ; ``intermediate_size`` is the most of them.
    ``layer_inputs``: features of the embedding that a token has for each layer; 0: it has none.
    ``layer_rows``: how many tokens have a row of them, from the first on; 0: all.
    ``streams``: the sizes of residual streams; ``None``: there is one.
    ``latent``: the widths of latent attention; then ``head_dim`` is that of the one key that a
    token keeps, and there is one key head.
    ``chunked_windows``: a token sees the tokens from the last multiple of the window on.
    ``vision``: its encoder of images, if it has one that is supported.
    ``mlp_limits``, ``expert_limits``: the clamp of both factors of an MLP (the shared experts',
    too) and of an expert in each layer, ``None``: none; empty: of all layers.
    ``activation_slope``: of an MLP without a gate: it computes ``act(slope * x) / slope``.
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
    causal: bool = True
    alibi: Alibi | None = None
    query_scale: QueryScale | None = None
    post_norm_eps: float | None = None
    parallel_blocks: bool = False
    qk_norm: bool = True
    head_bias: bool = False
    first_position: int | None = None
    token_types: int = 0
    tasks: int = 0
    qkv_clip: float | None = None
    one_norm: bool = False
    post_norm: bool = False
    buckets: DistanceBuckets | None = None
    down_bias: bool = False
    embedding_size: int | None = None
    layer_heads: tuple[int, ...] = ()
    gate_per_head: bool | None = None
    blocks: tuple[Blocks, ...] = ()
    recurrent: RecurrentSpec | None = None
    attention_factor: float = 1.0
    mlp_factors: tuple[float, float] = (1.0, 1.0)
    layer_caches: LayerCaches = ()
    keys_as_values: tuple[bool, ...] = ()
    layer_widths: tuple[int, ...] = ()
    layer_inputs: int = 0
    layer_rows: int = 0
    streams: StreamSpec | None = None
    latent: LatentSpec | None = None
    chunked_windows: bool = False
    vision: VisionConfig | None = None
    mlp_limits: tuple[float | None, ...] = ()
    expert_limits: tuple[float | None, ...] = ()
    activation_slope: float = 1.0

    def blocks_of(self, layer: int) -> Blocks:
        """Of what a layer consists."""
        return self.blocks[layer] if self.blocks else Blocks()

    def heads_of(self, layer: int) -> int:
        """The query heads of a layer."""
        return self.layer_heads[layer] if self.layer_heads else self.num_heads

    @property
    def caches(self) -> tuple[Cache, ...]:
        """What its layers keep of the tokens before, in the order of the layers; in a layer
        attention comes first."""
        return self.rank_caches(1)

    def rank_caches(self, ranks: int) -> tuple[Cache, ...]:
        """The same with what one of ``ranks`` ranks keeps of recurrent states.

        :raises AlignmentError: the heads of states cannot be divided over the ranks.
        """
        if self.layer_caches:
            return tuple(self._own_caches(self.num_layers))
        found = list[Cache]()
        state = None if self.recurrent is None else self.recurrent.cache(ranks)
        for layer in range(self.num_layers):
            blocks = self.blocks_of(layer)
            if blocks.attention:
                found.append(self._uniform_cache(layer))
            if blocks.recurrent and state is not None:
                found.append(state)
        return tuple(found)

    def caches_of(self, layer: int) -> tuple[int, ...]:
        """The numbers of a layer's caches in :attr:`caches`, in the order in which it uses them.
        Layers may share one."""
        if self.layer_caches:
            if not self.blocks_of(layer).attention:
                return ()
            own = self.layer_caches[layer]
            first = own if isinstance(own, int) else layer
            return (len(self._own_caches(first)),)
        counts = [int(one.attention) + int(one.recurrent) for one in self.blocks[: layer + 1]]
        if not counts:
            return (layer,)
        return tuple(range(sum(counts[:-1]), sum(counts)))

    def _own_caches(self, layers: int) -> list[AttentionCache]:
        """What the first ``layers`` of :attr:`layer_caches` have themselves."""
        found = enumerate(self.layer_caches[:layers])
        return [c for i, c in found if not isinstance(c, int) and self.blocks_of(i).attention]

    def attention_of(self, layer: int) -> AttentionCache:
        """The cache of a layer's keys and values."""
        if not self.layer_caches:
            return self._uniform_cache(layer)
        own = self.layer_caches[layer]
        found = self.layer_caches[own] if isinstance(own, int) else own
        assert isinstance(found, AttentionCache)
        return found

    def _uniform_cache(self, layer: int) -> AttentionCache:
        """That of a model whose layers of attention differ in their windows alone."""
        latent, dim = self.latent, self.head_dim
        values, window = dim if latent is None else latent.rank, self.sliding_windows[layer]
        return AttentionCache(self.num_kv_heads, dim, values, window, latent is not None)

    def window_group_of(self, layer: int) -> int | None:
        """The window group that has a layer's page table (:func:`sdk.quant.caches.window_groups`);
        ``None``: its cache keeps all tokens."""
        groups, window = window_groups(self.caches), self.sliding_windows[layer]
        return groups.index(window) if window in groups and self.causal else None

    def shares_keys(self, layer: int) -> bool:
        """Whether a layer reads the keys and values of an earlier one and has none itself."""
        return bool(self.layer_caches) and isinstance(self.layer_caches[layer], int)

    @property
    def sharing_layers(self) -> tuple[int, ...]:
        """Those for which :meth:`shares_keys` is true."""
        return tuple(i for i in range(self.num_layers) if self.shares_keys(i))

    def width_of(self, layer: int) -> int:
        """The width of a layer's MLP."""
        return self.layer_widths[layer] if self.layer_widths else self.intermediate_size

    def mlp_limit(self, layer: int) -> float | None:
        """The clamp of a layer's MLP and shared experts."""
        return self.mlp_limits[layer] if self.mlp_limits else None

    def expert_limit(self, layer: int) -> float | None:
        """The clamp of a layer's experts."""
        return self.expert_limits[layer] if self.expert_limits else None

    def like_layer(self, layer: int, *, experts: bool) -> ModelConfig:
        """A model of one layer with attention like that of a layer of this model, and ``experts``
        or an MLP."""
        spec, own = self.experts if experts else None, bool(self.layer_caches)
        return replace(
            self,
            num_layers=1,
            rope_of_layer=(self.rope_of_layer[layer],),
            sliding_windows=(self.sliding_windows[layer],),
            num_heads=self.heads_of(layer),
            layer_heads=(),
            experts=None if spec is None else replace(spec, layers=(True,)),
            blocks=(),
            recurrent=None,
            layer_caches=(self.attention_of(layer),) if own else (),
            keys_as_values=self.keys_as_values[layer : layer + 1],
            intermediate_size=self.width_of(layer),
            layer_widths=(),
            mlp_limits=self.mlp_limits[layer : layer + 1],
            expert_limits=self.expert_limits[layer : layer + 1],
        )

    @property
    def embedding_width(self) -> int:
        """Features of an embedding."""
        return self.embedding_size or self.hidden_size

    @property
    def output_size(self) -> int:
        """Features of the hidden states that leave the model, after a projection behind the layers
        too."""
        own = architecture(self.model_type)
        projected = own is not None and own.embedding.projected == "tokens"
        return self.embedding_width if projected else self.hidden_size

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face config of transformers 4 or 5, or the one made from a GGUF file.

        Of a multimodal config, the text model is read.

        :raises CheckpointError: names the field, what was expected and what was found.
        :raises UnsupportedError: a rotary scaling, activation or layer type we do not have.
        """
        if isinstance(text := config.get("text_config"), Mapping):
            found = cls.from_dict({**_outer_facts(config), **text_part(config, text)})
            return replace(found, vision=_vision(config, found.ropes))
        model_type = Fields(config).text("model_type")
        known = architecture(model_type)
        own = known or Architecture(model_type)
        rules, embedding = own.config, own.embedding
        config, fields = _checked(config, known)
        hidden = fields.count("hidden_size", MAX_WIDTH)
        layers = fields.count("num_hidden_layers", MAX_LAYERS)
        latent = None if rules.latent is None else rules.latent(fields)
        layer_heads, heads, kv_heads, head_dim = heads_of(fields, hidden, layers, latent)
        first, max_position = _positions(fields, embedding, latent)
        causal = rules.causal and is_causal(fields)
        windows = windows_of(config, fields, known, layers)
        caches = layer_caches(fields, rules, windows, layer_heads or [heads] * layers)
        dims = head_dims(caches, windows, head_dim if latent is None else latent.turning)
        ropes, of_layer = ropes_of(fields, rules, dims, windows)
        experts = known and experts_of(fields, known, layers)
        activation, slope = _checked_activation(fields, known, experts)
        widths = () if rules.widths is None else tuple(rules.widths(fields, layers))
        return cls(
            model_type=own.model_type,
            vocab_size=fields.count("vocab_size", MAX_VOCAB),
            hidden_size=hidden,
            intermediate_size=max(widths) if widths else _width(fields, rules, experts),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=max(dims) if latent is None else head_dim,
            norm_eps=_norm_eps(fields, rules),
            activation=activation,
            activation_slope=slope,
            max_position=max_position,
            ropes=ropes,
            rope_of_layer=of_layer,
            sliding_windows=windows if causal else symmetric_windows(fields, windows),
            attention_scale=rules.attention_scale or attention_scale(fields, head_dim, latent),
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
            experts=experts,
            causal=causal,
            first_position=first,
            post_norm=(rules.post_norm or (lambda _: own.layer.post_norm))(fields),
            token_types=_token_types(fields) if embedding.types else 0,
            tasks=_tasks(fields) if embedding.tasks else 0,
            embedding_size=_embedding_size(fields, hidden) if embedding.projected else None,
            latent=latent,
            layer_heads=layer_heads,
            layer_caches=caches,
            layer_widths=widths,
            vision=_vision(config, ropes),
            **_numbers(fields, rules, hidden),
            **_of_layers(fields, rules, windows),
            **_of_blocks(fields, rules),
        )


def _vision(config: Mapping[str, Any], ropes: Sequence[RopeSpec]) -> VisionConfig | None:
    """Its encoder of images, if it has one that is supported.

    :raises CheckpointError: the axes of rotary frequencies are not as many as these.
    """
    found = vision_of(config)
    if found is None or found.sections is None:
        return found
    from sdk.models.vision.config import interleaved_axes, plain_axes

    axes = interleaved_axes if found.interleaved else plain_axes
    return replace(found, axes=axes(found.sections, ropes[0].rotary_dim // 2))


def _numbers(fields: Fields, rules: ConfigRules, hidden: int) -> dict[str, Any]:
    """Factors, soft caps and limits."""
    return {
        "attention_softcap": fields.optional_positive("attn_logit_softcapping"),
        "final_softcap": fields.optional_positive("final_logit_softcapping"),
        "embedding_scale": _embedding_scale(fields, rules, hidden),
        "residual_scale": fields.positive("residual_multiplier", default=1.0),
        "logits_scale": _logits_scale(fields),
        "post_norm_eps": fields.optional_positive("post_norm_eps"),
        "qkv_clip": fields.optional_positive("clip_qkv"),
        "attention_factor": fields.positive("attention_output_factor", default=1.0),
        "mlp_factors": _mlp_factors(fields),
    }


def _of_blocks(fields: Fields, rules: ConfigRules) -> dict[str, Any]:
    """Biases, norms and what attention has besides."""
    biases = (rules.biases or _biases)(fields)
    gate = rules.gate_per_head
    return {
        "attention_bias": biases.qkv,
        "output_bias": biases.output,
        "mlp_bias": biases.mlp,
        "head_bias": biases.head,
        "down_bias": biases.mlp or biases.down,
        "alibi": None if rules.alibi is None else rules.alibi(fields),
        "query_scale": None if rules.query_scale is None else rules.query_scale(fields),
        "parallel_blocks": bool(rules.parallel_blocks and rules.parallel_blocks(fields)),
        "qk_norm": (rules.qk_norm or _qk_norm)(fields),
        "one_norm": bool(rules.one_norm and rules.one_norm(fields)),
        "buckets": None if rules.buckets is None else rules.buckets(fields),
        "gate_per_head": None if gate is None else gate(fields),
    }


def _of_layers(fields: Fields, rules: ConfigRules, windows: Sequence[int | None]) -> dict[str, Any]:
    """What layers are, where that differs from model to model."""
    values = rules.keys_as_values
    return {
        "blocks": _blocks(fields, rules, len(windows)),
        "recurrent": None if rules.recurrent is None else rules.recurrent(fields),
        "keys_as_values": () if values is None else tuple(values(fields, windows)),
        "layer_inputs": _layer_inputs(fields, rules),
        "layer_rows": _layer_rows(fields, rules),
        "streams": None if rules.streams is None else rules.streams(fields, len(windows)),
        "chunked_windows": chunked(fields),
        "mlp_limits": _limits(fields, rules, "swiglu_limits_shared", len(windows)),
        "expert_limits": _limits(fields, rules, "swiglu_limits", len(windows)),
    }


def _limits(fields: Fields, rules: ConfigRules, key: str, layers: int) -> tuple[float | None, ...]:
    found = () if rules.limits is None else tuple(rules.limits(key, fields, layers))
    for limit in found:
        if limit is not None and limit < LEAST_LIMIT:
            fields.fail(key, f"numbers of at least {LEAST_LIMIT}", limit)
    return found if any(found) else ()


def _checked(
    config: Mapping[str, Any], own: Architecture | None
) -> tuple[Mapping[str, Any], Fields]:
    """A config with our keys, and what its model reads of it, with the class's defaults."""
    config = with_our_keys(config)
    check_fixed(config, "config")
    defaults = {} if own is None else own.config.defaults
    return config, Fields({**defaults, **without_null(only_read(config, own))})


def _width(fields: Fields, rules: ConfigRules, experts: ExpertSpec | None) -> int:
    """The width of MLPs without experts; some models whose layers all have experts state none."""
    key = rules.dense_width
    if key is None or not fields.has(key):
        key = "intermediate_size"
    return fields.count(key, MAX_WIDTH, default=None if experts is None else experts.width)


def _norm_eps(fields: Fields, rules: ConfigRules) -> float:
    eps = rules.norm_eps
    return eps if isinstance(eps, float) else fields.positive(eps)


def _embedding_scale(fields: Fields, rules: ConfigRules, hidden: int) -> float:
    scale = 1.0
    if rules.embedding_scale is not None and fields.flag("mup_enabled", default=True):
        scale = rules.embedding_scale(hidden)
    return fields.positive("embedding_multiplier", default=scale)


def _qk_norm(fields: Fields) -> bool:
    return fields.flag("use_qk_norm", default=True)


def _logits_scale(fields: Fields) -> float:
    """What divides logits; some models say what multiplies them."""
    factors = (fields.positive(key, default=1.0) for key in ("logit_scale", "output_multiplier"))
    return fields.positive("logits_scaling", default=1.0) / math.prod(factors)


def _biases(fields: Fields) -> Biases:
    attention = fields.flag("attention_bias", default=False)
    return Biases(attention, attention, fields.flag("mlp_bias", default=False))


def _layer_inputs(fields: Fields, rules: ConfigRules) -> int:
    key = rules.layer_inputs
    if key is None or fields.values.get(key, 0) == 0:
        return 0
    return fields.count(key, MAX_WIDTH)


def _layer_rows(fields: Fields, rules: ConfigRules) -> int:
    if rules.layer_rows is None:
        return 0
    vocab = fields.count("vocab_size", MAX_VOCAB)
    rows = fields.count(rules.layer_rows, MAX_VOCAB, default=vocab)
    return rows if rows < vocab else 0


def _positions(
    fields: Fields, rules: EmbeddingRules, latent: LatentSpec | None
) -> tuple[int | None, int]:
    """The row of position 0, and the longest context, without rows that come before it."""
    rows = fields.count("max_position_embeddings", MAX_POSITION)
    padding = fields.values.get("pad_token_id")
    first = rules.positions if rules.sines else None
    if isinstance(first, int) and type(padding) is int and padding >= first:
        # transformers makes the row of this number 0, and here it is that of a position
        fields.fail("pad_token_id", f"at most {first - 1}", padding)
    if rules.positions != "after padding":
        most = rows if latent is None or latent.chosen is None else min(rows, latent.chosen)
        return rules.positions, most
    if type(padding) is not int or not 0 <= padding < rows - 1:
        fields.fail("pad_token_id", f"an integer in 0..{rows - 2}", padding)
    return padding + 1, rows - padding - 1


def _embedding_size(fields: Fields, hidden: int) -> int | None:
    found = fields.count("embedding_size", MAX_WIDTH, default=hidden)
    return None if found == hidden else found


def _token_types(fields: Fields) -> int:
    """0: the model has no table of them."""
    if fields.values.get("type_vocab_size") == 0:
        return 0
    return fields.count("type_vocab_size", MAX_WIDTH)


def _tasks(fields: Fields) -> int:
    """0: the model has no table of them, or does not use it."""
    if not fields.flag("use_task_id", default=False):
        return 0
    return fields.count("task_type_vocab_size", MAX_WIDTH, default=3)


def _outer_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a multimodal config has outside its text part."""
    keys = ("model_type", "tie_word_embeddings")
    return {key: config[key] for key in keys if config.get(key) is not None}


def _mlp_factors(fields: Fields) -> tuple[float, float]:
    if not fields.has("mlp_multipliers"):
        return 1.0, 1.0
    gate, out = fields.factors("mlp_multipliers", 2)
    return gate, out


def _blocks(fields: Fields, rules: ConfigRules, layers: int) -> tuple[Blocks, ...]:
    """Of what each layer consists; empty if all attend and have an MLP."""
    kinds = fields.values.get("layer_types")
    if not rules.kinds or kinds is None:
        return ()
    return tuple(rules.kinds.get(kind, Blocks()) for kind in kinds[:layers])


def _checked_activation(
    fields: Fields, own: Architecture | None, experts: ExpertSpec | None
) -> tuple[Activation, float]:
    """The activation and its slope.

    :raises UnsupportedError: an activation with numbers of its own or a slope, where a gate or an
        expert has no place for them.
    """
    rules = ConfigRules() if own is None else own.config
    if rules.activation is not None:
        found, slope = rules.activation(fields), 1.0
    else:
        found, slope = _activation(fields)
    gated = own is None or own.layer.gated
    if (found in NUMBERS or slope != 1.0) and (gated or experts is not None):
        stated = found if slope == 1.0 else "quick_gelu"
        raise UnsupportedError(
            f"config: hidden_act: expected an activation without numbers of its own, found "
            f"{stated!r}: it runs in an MLP without a gate only"
        )
    return found, slope


def _activation(fields: Fields) -> tuple[Activation, float]:
    names = ("hidden_activation", "hidden_act")
    name = next((n for n in names if fields.has(n)), "hidden_act")
    return sloped_activation(fields.text(name, default="silu"), name)
