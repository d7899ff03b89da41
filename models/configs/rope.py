"""Rotary embeddings of a config, in transformers' spellings of versions 4 and 5."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from sdk.models.configs.fields import MAX_POSITION, Fields, without_null
from sdk.models.rope import ROPE_TYPES, RopeSpec
from sdk.quant.errors import UnsupportedError

Rotation = Callable[[Mapping[str, Any], int], Mapping[str, Any]]


def ropes_of_layers(
    fields: Fields,
    head_dims: tuple[int, int],
    windows: Sequence[int | None],
    unrotated: Sequence[bool] | None = None,
    rotation: Rotation | None = None,
) -> tuple[tuple[RopeSpec, ...], tuple[int, ...]]:
    """The rotary embeddings of a model, and which of them each layer has.

    ``head_dims``: of layers that see all tokens, and of those that slide. ``windows``: the sliding
    window of each layer. ``unrotated``: the layers without one.
    ``rotation``: see :class:`sdk.models.architecture.ConfigRules`. ``layer_rope_theta`` of a config
    gives each layer a base of its own, or 0 for none.
    """
    full, local = _of_full_and_sliding(fields, head_dims, rotation)
    if fields.has("layer_rope_theta"):
        return _by_layer(fields, full, len(windows))
    ropes = [full]
    if local is not None:
        ropes.append(local)
    sliding = len(ropes) - 1
    of_layer = [0 if window is None else sliding for window in windows]
    if unrotated is not None and any(unrotated):
        of_layer = [
            len(ropes) if still else n for n, still in zip(of_layer, unrotated, strict=True)
        ]
        ropes.append(unrotated_rope(full))
    return tuple(ropes), tuple(of_layer)


def _by_layer(
    fields: Fields, rope: RopeSpec, layers: int
) -> tuple[tuple[RopeSpec, ...], tuple[int, ...]]:
    """One rotary embedding for each base in ``layer_rope_theta``."""
    bases = fields.values["layer_rope_theta"]
    if not isinstance(bases, (list, tuple)) or len(bases) != layers:
        fields.fail("layer_rope_theta", f"a list of {layers} numbers", bases)
    each = Fields({str(i): base for i, base in enumerate(bases)}, "config: layer_rope_theta")
    found = [0.0 if base == 0 else each.positive(i, above=1.0) for i, base in each.values.items()]
    different = list(dict.fromkeys(found))
    ropes = [replace(rope, theta=base) if base else unrotated_rope(rope) for base in different]
    return tuple(ropes), tuple(map(different.index, found))


def unrotated_rope(rope: RopeSpec) -> RopeSpec:
    """That of the layers of a model that do not rotate."""
    return RopeSpec(rope.theta, rope.rotary_dim, rope.max_position, type="none")


def _of_full_and_sliding(
    fields: Fields, head_dims: tuple[int, int], rotation: Rotation | None
) -> tuple[RopeSpec, RopeSpec | None]:
    """The rotary embedding of the full layers and, where it differs, of the sliding ones."""
    head_dim, sliding = head_dims
    scaling = fields.mapping("rope_parameters") or fields.mapping("rope_scaling")
    per_type = Fields(scaling, "config: rope_parameters")
    if per_type.has("full_attention") or per_type.has("sliding_attention"):
        full = _rope(fields, per_type.mapping("full_attention"), head_dim)
        local = {**per_type.mapping("sliding_attention")}
        local.setdefault("rope_theta", fields.values.get("rope_local_base_freq"))
        return full, _rope(fields, without_null(local), sliding)
    if rotation is not None:
        base = {"rope_theta": fields.values.get("rope_theta", 10000.0)}
        scaling = {**rotation({**base, **scaling}, head_dim)}
    full = _rope(fields, scaling, head_dim)
    if not fields.has("rope_local_base_freq"):
        return full, None
    return full, _rope(fields, {"rope_theta": fields.positive("rope_local_base_freq")}, sliding)


def _rope(fields: Fields, scaling: Mapping[str, Any], head_dim: int) -> RopeSpec:
    s = Fields({"rope_theta": fields.values.get("rope_theta", 10000.0), **scaling}, "config: rope")
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
