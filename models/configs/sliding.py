"""Which layers have a sliding attention window: by ``layer_types``, else by a model's own rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sdk.models.configs.fields import MAX_LAYERS, MAX_POSITION, Fields
from sdk.quant.errors import UnsupportedError

#: ``rule(fields, layers)``: for every layer whether it slides, where a config has no
#: ``layer_types``.
SlidingRule = Callable[[Fields, int], Sequence[bool]]


def no_layer(fields: Fields, layers: int) -> list[bool]:
    return [False] * layers


def all_but_every(period: int) -> SlidingRule:
    """All layers (1), or all but every ``period``-th. ``sliding_window_pattern`` overrides it."""

    def rule(fields: Fields, layers: int) -> list[bool]:
        if not fields.values.get("sliding_window"):
            return [False] * layers
        every = fields.count("sliding_window_pattern", MAX_LAYERS, default=period)
        return [every == 1 or (layer + 1) % every != 0 for layer in range(layers)]

    return rule


def chunked(fields: Fields) -> bool:
    """Whether windows begin at multiples of their size."""
    kinds = fields.values.get("layer_types")
    read = fields.has("attention_chunk_size")
    return isinstance(kinds, (list, tuple)) and read and "chunked_attention" in kinds


def sliding_windows(
    fields: Fields, layers: int, rule: SlidingRule, others: Sequence[str] = ()
) -> tuple[int | None, ...]:
    """How many tokens each layer sees, itself included; ``None`` for all. ``others``: names of
    layers that a model has besides those that attend."""
    kinds = fields.values.get("layer_types")
    if kinds is None:
        sliding = rule(fields, layers)
    else:
        if not isinstance(kinds, (list, tuple)) or len(kinds) != layers:
            found = len(kinds) if isinstance(kinds, (list, tuple)) else kinds
            fields.fail("layer_types", f"a list of {layers} names", found)
        own = "chunked_attention" if chunked(fields) else "sliding_attention"
        known = ("full_attention", own, *others)
        unknown = [k for k in kinds if k not in known]
        if unknown:
            names = " or ".join((", ".join(known[:-1]), known[-1]))
            raise UnsupportedError(f"config: layer_types: expected {names}, found {unknown[0]!r}")
        sliding = [kind == own for kind in kinds]
    if not any(sliding):
        return (None,) * layers
    size = "attention_chunk_size" if chunked(fields) else "sliding_window"
    window = fields.count(size, MAX_POSITION)
    return tuple(window if slides else None for slides in sliding)
