"""The facts of a decoder, read once from the checkpoint's config and checked.

Published configs come in several dialects: transformers 4 (``rope_theta``, ``rope_scaling``),
transformers 5 (``rope_parameters``, possibly one per layer type; ``layer_types``), and what the
GGUF loader makes of metadata. :meth:`ModelConfig.from_dict` is the only place that knows them. A
value that cannot be is refused by name, before anything is allocated from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from sdk.kernels.ops import Activation
from sdk.models.rope import ROPE_TYPES, RopeSpec
from sdk.quant.errors import CheckpointError, UnsupportedError

MAX_LAYERS = 512
#: Counts beyond these are damage, not models: they bound what a bad file can make us allocate.
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 24
MAX_POSITION = 1 << 27
MAX_EXPERTS = 1024

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
}
#: Which layers slide when the config lists no ``layer_types``: all (1), or all but every n-th.
WINDOW_PATTERNS = {
    "mistral": 1,
    "mixtral": 1,
    "phi3": 1,
    "qwen3_moe": 1,
    "gemma2": 2,
    "gpt_oss": 2,
    "gemma3_text": 6,
}
#: What a family takes where its config says nothing (transformers' class defaults).
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "gemma2": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3_text": {
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    "qwen3": {"head_dim": 128},
    "qwen3_moe": {"norm_topk_prob": False},
    "gpt_oss": {"head_dim": 64, "attention_bias": True},
    "granite": {"attention_multiplier": 1.0},
}


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
    """A decoder, normalized. Sizes count features or tokens; one entry of ``windows`` per layer.

    ``windows``: how many tokens a layer sees, itself included, ``None`` for all. ``local_rope``:
    the rotary embedding of the sliding layers where it differs from ``rope`` (Gemma 3).
    ``attention_bias`` is that of q, k and v, ``output_bias`` of the projection after attention.
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
    rms_norm_eps: float
    activation: Activation
    max_position: int
    rope: RopeSpec
    local_rope: RopeSpec | None
    windows: tuple[int | None, ...]
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

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a Hugging Face config, of transformers 4 or 5, or the one a GGUF file gives.

        A multimodal config is read as the text model inside it.

        :raises CheckpointError: naming the field, what was expected and what was found.
        :raises UnsupportedError: for a rotary scaling, activation or layer type we do not have.
        """
        text = config.get("text_config")
        if isinstance(text, Mapping):
            return cls.from_dict({**_outer_facts(config), **text})
        fields = _Fields(config)
        model_type = fields.text("model_type")
        if model_type == "gemma3":
            model_type = "gemma3_text"
        fields = _Fields({**DEFAULTS.get(model_type, {}), **_without_none(config)})
        hidden = fields.count("hidden_size", MAX_WIDTH)
        heads = fields.count("num_attention_heads", MAX_WIDTH)
        kv_heads = fields.count("num_key_value_heads", MAX_WIDTH, default=heads)
        if heads % kv_heads:
            fields.fail("num_key_value_heads", f"a divisor of {heads} heads", kv_heads)
        if not fields.has("head_dim") and hidden % heads:
            fields.fail("num_attention_heads", f"a divisor of hidden_size {hidden}", heads)
        head_dim = fields.count("head_dim", 4096, default=hidden // heads)
        layers = fields.count("num_hidden_layers", MAX_LAYERS)
        gemma = model_type.startswith("gemma")
        bias = fields.flag("attention_bias", default=False)
        scale = fields.positive("query_pre_attn_scalar", default=float(head_dim)) ** -0.5
        rope, local_rope = _ropes(fields, head_dim)
        return cls(
            model_type=model_type,
            vocab_size=fields.count("vocab_size", MAX_VOCAB),
            hidden_size=hidden,
            intermediate_size=fields.count("intermediate_size", MAX_WIDTH),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.positive("rms_norm_eps"),
            activation=_activation(fields, model_type),
            max_position=fields.count("max_position_embeddings", MAX_POSITION),
            rope=rope,
            local_rope=local_rope,
            windows=_windows(fields, model_type, layers),
            attention_scale=fields.positive("attention_multiplier", default=scale),
            attention_softcap=fields.optional_positive("attn_logit_softcapping"),
            final_softcap=fields.optional_positive("final_logit_softcapping"),
            embedding_scale=fields.positive(
                "embedding_multiplier", default=math.sqrt(hidden) if gemma else 1.0
            ),
            residual_scale=fields.positive("residual_multiplier", default=1.0),
            logits_scale=fields.positive("logits_scaling", default=1.0),
            attention_bias=bias or model_type == "qwen2",
            output_bias=bias and model_type != "qwen2",
            mlp_bias=fields.flag("mlp_bias", default=False),
            tie_word_embeddings=fields.flag("tie_word_embeddings", default=False),
            experts=_experts(fields, model_type, layers),
        )


def _without_none(config: Mapping[str, Any]) -> dict[str, Any]:
    """JSON ``null`` means absent, except that it switches a soft cap off."""
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {key: value for key, value in config.items() if value is not None or key in caps}


def _outer_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a multimodal config says outside its text part."""
    keys = ("model_type", "tie_word_embeddings")
    return {key: config[key] for key in keys if config.get(key) is not None}


class _Fields:
    """Typed reads of a config; ``where`` prefixes the names in messages."""

    def __init__(self, values: Mapping[str, Any], where: str = "config") -> None:
        self.values = values
        self.where = where

    def fail(self, name: str, expected: str, found: object) -> NoReturn:
        raise CheckpointError(f"{self.where}: {name}: expected {expected}, found {found!r}")

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def text(self, name: str, default: str | None = None) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str) or not value:
            self.fail(name, "a name", value)
        return value

    def count(self, name: str, limit: int, default: int | None = None) -> int:
        """An integer in ``1..limit``."""
        value = self.values.get(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
            self.fail(name, f"an integer in 1..{limit}", value)
        return value

    def positive(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A number, within what later powers and logarithms can bear."""
        value = self.values.get(name, default)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not max(above, 1e-30) <= value <= 1e30 or value == above:
            self.fail(name, f"a number above {above:g}", value)
        return float(value)

    def optional_positive(self, name: str) -> float | None:
        return self.positive(name) if self.has(name) else None

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            self.fail(name, "true or false", value)
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """A nested object; empty when absent."""
        value = self.values.get(name) or {}
        if not isinstance(value, Mapping):
            self.fail(name, "an object", value)
        return _without_none(value)

    def factors(self, name: str, length: int) -> tuple[float, ...]:
        """``length`` numbers above 0."""
        value = self.values.get(name)
        if not isinstance(value, (list, tuple)) or len(value) != length:
            found = len(value) if isinstance(value, (list, tuple)) else value
            self.fail(name, f"a list of {length} numbers", found)
        numbers = _Fields({str(i): x for i, x in enumerate(value)}, f"{self.where}: {name}")
        return tuple(numbers.positive(str(i)) for i in range(length))


def _experts(fields: _Fields, model_type: str, layers: int) -> ExpertSpec | None:
    if model_type not in ("mixtral", "qwen3_moe", "gpt_oss"):
        return None
    name = "num_experts" if fields.has("num_experts") else "num_local_experts"
    count = fields.count(name, MAX_EXPERTS)
    wide = "moe_intermediate_size" if model_type == "qwen3_moe" else "intermediate_size"
    step = fields.count("decoder_sparse_step", MAX_LAYERS, default=1)
    dense = fields.values.get("mlp_only_layers", ())
    if not isinstance(dense, (list, tuple)):
        fields.fail("mlp_only_layers", "a list of layers", dense)
    return ExpertSpec(
        count=count,
        per_token=fields.count("num_experts_per_tok", count),
        width=fields.count(wide, MAX_WIDTH),
        normalized=fields.flag("norm_topk_prob", default=True),
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(layers)),
    )


def _activation(fields: _Fields, model_type: str) -> Activation:
    if model_type == "gpt_oss":
        for name, expected in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
            if fields.positive(name, default=expected) != expected:
                found = fields.values[name]
                raise UnsupportedError(f"config: {name}: expected {expected}, found {found}")
        return "clamped_swiglu"
    names = ("hidden_activation", "hidden_act")
    name = next((n for n in names if fields.has(n)), "hidden_act")
    found = fields.text(name, default="silu")
    if found not in ACTIVATIONS:
        raise UnsupportedError(
            f"config: {name}: expected one of {sorted(ACTIVATIONS)}, found {found!r}"
        )
    return ACTIVATIONS[found]


def _windows(fields: _Fields, model_type: str, layers: int) -> tuple[int | None, ...]:
    """The sliding window of every layer."""
    kinds = fields.values.get("layer_types")
    if kinds is not None:
        if not isinstance(kinds, (list, tuple)) or len(kinds) != layers:
            found = len(kinds) if isinstance(kinds, (list, tuple)) else kinds
            fields.fail("layer_types", f"a list of {layers} names", found)
        unknown = [k for k in kinds if k not in ("full_attention", "sliding_attention")]
        if unknown:
            raise UnsupportedError(
                "config: layer_types: expected full_attention or sliding_attention, "
                f"found {unknown[0]!r}"
            )
        sliding = [kind == "sliding_attention" for kind in kinds]
    elif model_type in ("qwen2", "qwen3"):
        on = fields.flag("use_sliding_window", default=False) and fields.has("sliding_window")
        first = fields.values.get("max_window_layers", 28) if on else layers
        if not isinstance(first, int) or first < 0:
            fields.fail("max_window_layers", "a number of layers", first)
        sliding = [layer >= first for layer in range(layers)]
    elif model_type == "qwen3_moe" and not fields.flag("use_sliding_window", default=False):
        sliding = [False] * layers
    elif model_type in WINDOW_PATTERNS and fields.values.get("sliding_window"):
        pattern = fields.count(
            "sliding_window_pattern", MAX_LAYERS, default=WINDOW_PATTERNS[model_type]
        )
        sliding = [pattern == 1 or (layer + 1) % pattern != 0 for layer in range(layers)]
    else:
        sliding = [False] * layers
    if not any(sliding):
        return (None,) * layers
    window = fields.count("sliding_window", MAX_POSITION)
    return tuple(window if slides else None for slides in sliding)


def _ropes(fields: _Fields, head_dim: int) -> tuple[RopeSpec, RopeSpec | None]:
    """The rotary embedding of the full layers and, where it differs, of the sliding ones."""
    scaling = fields.mapping("rope_parameters") or fields.mapping("rope_scaling")
    per_type = _Fields(scaling, "config: rope_parameters")
    if per_type.has("full_attention") or per_type.has("sliding_attention"):
        full = _rope(fields, per_type.mapping("full_attention"), head_dim)
        local = {**per_type.mapping("sliding_attention")}
        local.setdefault("rope_theta", fields.values.get("rope_local_base_freq"))
        return full, _rope(fields, _without_none(local), head_dim)
    full = _rope(fields, scaling, head_dim)
    if not fields.has("rope_local_base_freq"):
        return full, None
    return full, _rope(fields, {"rope_theta": fields.positive("rope_local_base_freq")}, head_dim)


def _rope(fields: _Fields, scaling: Mapping[str, Any], head_dim: int) -> RopeSpec:
    s = _Fields({"rope_theta": fields.values.get("rope_theta", 10000.0), **scaling}, "config: rope")
    kind = s.text("rope_type", default=s.text("type", default="default"))
    if kind == "su" or (kind == "yarn" and s.has("short_factor")):
        kind = "longrope"  # Phi-3's first names for it
    if kind not in ROPE_TYPES:
        raise UnsupportedError(f"config: rope_type: expected one of {ROPE_TYPES}, found {kind!r}")
    share = s.positive(
        "partial_rotary_factor", default=fields.values.get("partial_rotary_factor", 1.0)
    )
    turning = int(head_dim * share)
    rotary_dim = head_dim if kind == "proportional" else turning
    if share > 1 or rotary_dim < 2 or rotary_dim % 2:
        s.fail("partial_rotary_factor", f"an even share of head_dim {head_dim}", share)
    if kind == "dynamic" and rotary_dim < 4:
        s.fail("partial_rotary_factor", "at least 4 rotated dimensions", rotary_dim)
    max_position = fields.count("max_position_embeddings", MAX_POSITION)
    outer = fields.values.get("original_max_position_embeddings")
    original = s.count(
        "original_max_position_embeddings", MAX_POSITION, default=outer or max_position
    )
    if outer is not None and kind == "longrope":
        original = fields.count("original_max_position_embeddings", MAX_POSITION)
    if kind == "longrope" and original < 2:
        s.fail("original_max_position_embeddings", "at least 2 tokens", original)
    by_length = kind in ("yarn", "longrope")
    needs_factor = kind in ("linear", "dynamic", "llama3")
    default_factor = max_position / original if by_length else None if needs_factor else 1.0
    low, high = s.positive("low_freq_factor", 1.0), s.positive("high_freq_factor", 4.0)
    if kind == "llama3" and high <= low:
        s.fail("high_freq_factor", f"a number above low_freq_factor {low}", high)
    half = rotary_dim // 2
    return RopeSpec(
        theta=s.positive("rope_theta", above=1.0),
        rotary_dim=rotary_dim,
        max_position=max_position,
        type=kind,
        factor=s.positive("factor", default=default_factor),
        original_max_position=original,
        attention_factor=s.optional_positive("attention_factor"),
        beta_fast=s.positive("beta_fast", 32.0),
        beta_slow=s.positive("beta_slow", 1.0),
        mscale=s.optional_positive("mscale") or 0.0,
        mscale_all_dim=s.optional_positive("mscale_all_dim") or 0.0,
        truncate=s.flag("truncate", default=True),
        low_freq_factor=low,
        high_freq_factor=high,
        turning_dim=turning,
        long_factors=s.factors("long_factor", half) if kind == "longrope" else (),
        short_factors=s.factors("short_factor", half) if kind == "longrope" else (),
        freq_factors=s.factors("factors", half) if kind == "freq_factors" else (),
    )
