"""Reads what a config says of attention: heads, windows, rotations, and what layers cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdk.models.architecture import Architecture, ConfigRules, LayerCaches
from sdk.models.configs.fields import MAX_WIDTH, Fields, without_null
from sdk.models.configs.latent import latent_scale
from sdk.models.configs.latent_spec import LatentSpec
from sdk.models.configs.rope import ropes_of_layers
from sdk.models.configs.sliding import sliding_windows
from sdk.models.rope import RopeSpec
from sdk.quant.errors import UnsupportedError


def attention_scale(fields: Fields, head_dim: int, latent: LatentSpec | None) -> float:
    """What scores are multiplied with."""
    if latent is not None:
        return latent_scale(fields, latent)
    scale = fields.positive("query_pre_attn_scalar", default=float(head_dim)) ** -0.5
    scale = fields.positive("attention_multiplier", default=scale)
    return scale * fields.positive("qk_scale_factor", default=1.0)


def _layer_heads(fields: Fields, layers: int) -> tuple[int, ...]:
    """The query heads of each layer; empty if they are equal."""
    key = "num_attention_heads_per_layer"
    found = fields.values.get(key)
    if found is None:
        return ()
    if not isinstance(found, (list, tuple)) or len(found) != layers:
        fields.fail(key, f"a list of {layers} numbers", found)
    each = Fields({str(i): one for i, one in enumerate(found)}, f"config: {key}")
    counts = tuple(each.count(name, MAX_WIDTH) for name in each.values)
    return counts if len({*counts}) > 1 else ()


def ropes_of(
    fields: Fields, rules: ConfigRules, dims: tuple[int, int], windows: Sequence[int | None]
) -> tuple[tuple[RopeSpec, ...], tuple[int, ...]]:
    """See :func:`ropes_of_layers`; ``dims``: dimensions of a head that may rotate in layers that
    see all tokens, and in those with a window."""
    still = rules.unrotated and rules.unrotated(fields, windows)
    return ropes_of_layers(fields, dims, windows, still, rules.rotation)


def heads_of(
    fields: Fields, hidden: int, layers: int, latent: LatentSpec | None
) -> tuple[tuple[int, ...], int, int, int]:
    """The query heads of each layer (see above) and the most of them, key/value heads, and features
    of one."""
    if latent is not None:
        return (), fields.count("num_attention_heads", MAX_WIDTH), 1, latent.key
    each = _layer_heads(fields, layers)
    heads = max(each) if each else fields.count("num_attention_heads", MAX_WIDTH)
    kv_heads = fields.count("num_key_value_heads", MAX_WIDTH, default=heads)
    odd = next((one for one in each or (heads,) if one % kv_heads), None)
    if odd is not None and not fields.has("num_key_value_heads_per_layer"):  # those are checked
        fields.fail("num_key_value_heads", f"a divisor of {odd} heads", kv_heads)
    if not fields.has("head_dim") and hidden % heads:
        fields.fail("num_attention_heads", f"a divisor of hidden_size {hidden}", heads)
    return each, heads, kv_heads, fields.count("head_dim", 4096, default=hidden // heads)


def layer_caches(
    fields: Fields, rules: ConfigRules, windows: Sequence[int | None], heads: Sequence[int]
) -> LayerCaches:
    """See :data:`LayerCaches`. ``heads``: the query heads of each layer."""
    found = () if rules.caches is None else tuple(rules.caches(fields, windows))
    for one, own in zip(heads, found, strict=False):
        kv_heads = one if isinstance(own, int) else own.kv_heads
        if one % kv_heads:
            fields.fail("num_key_value_heads", f"a divisor of {one} heads in each layer", kv_heads)
    return found


def head_dims(caches: LayerCaches, windows: Sequence[int | None], head_dim: int) -> tuple[int, int]:
    """The features of a head in layers that see all tokens, and in those with a window."""
    if not caches:
        return head_dim, head_dim
    own = [one for one in caches if not isinstance(one, int)]
    by_kind = {one.window is not None: one.key_dim for one in reversed(own)}
    return by_kind.get(False, by_kind.get(True, 0)), by_kind.get(True, by_kind.get(False, 0))


def is_causal(fields: Fields) -> bool:
    """What a config of a decoder may say: the key of transformers, that of its Gemma, or neither.
    "vision": only the tokens of an image see one another both ways."""
    both = fields.values.get("use_bidirectional_attention", False)
    if both not in (True, False, "vision"):
        fields.fail("use_bidirectional_attention", "true or false", both)
    return both is not True and fields.flag("is_causal", default=True)


def symmetric_windows(fields: Fields, windows: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """The windows of tokens that see as far after as before them.

    Configs say how many tokens that is on each side. Gemma's say how many they are in all.
    """
    in_all = fields.values.get("use_bidirectional_attention") is True
    return tuple(w and (w // 2 if in_all else w) + 1 for w in windows)


def windows_of(
    config: Mapping[str, Any], fields: Fields, own: Architecture | None, layers: int
) -> tuple[int | None, ...]:
    """The sliding windows. transformers' class of some models does not read ``layer_types``: then
    they must say what it does anyway, because vLLM and others do read them."""
    rules = ConfigRules() if own is None else own.config
    rule = rules.sliding
    windows = sliding_windows(fields, layers, rule, tuple(rules.kinds))
    kinds = config.get("layer_types")
    if own is not None and kinds is not None and "layer_types" not in own.config.keys:
        stated = {"layer_types": kinds, "sliding_window": config.get("sliding_window")}
        found = sliding_windows(Fields(without_null(stated)), layers, rule, tuple(rules.kinds))
        if found != windows:
            index = next(i for i in range(layers) if found[i] != windows[i])
            raise UnsupportedError(
                f"config: layer_types[{index}]: found {kinds[index]!r}, but transformers' "
                f"{own.model_type} does not read layer_types: expected "
                f"{'full' if windows[index] is None else 'sliding'}_attention"
            )
    return windows
