"""JSON schemas that frameworks write, for answers that are constrained to them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Keywords whose schemas describe parts of a value, or the whole value alone.
_ONE = ("items", "additionalItems")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_MAPS = ("properties", "$defs", "definitions")


def closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema with objects that have the properties they list and no others.

    JSON Schema allows any others unless it says ``additionalProperties``, and a model that may add
    some often does so without an end. Objects that say it themselves stay as they are; so does a
    schema with an ``allOf`` of several, whose parts would exclude each other.
    """
    return dict(schema) if _combines(schema) else _closed(schema)


def _closed(schema: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(schema)
    for key in _ONE:
        if isinstance(found.get(key), Mapping):
            found[key] = _closed(found[key])
    for key in _LISTS:
        if isinstance(found.get(key), list):
            found[key] = [_closed(one) if isinstance(one, Mapping) else one for one in found[key]]
    for key in _MAPS:
        if isinstance(found.get(key), Mapping):
            found[key] = {
                name: _closed(one) if isinstance(one, Mapping) else one
                for name, one in found[key].items()
            }
    others = ("additionalProperties", "patternProperties", "unevaluatedProperties")
    if "properties" in found and not any(name in found for name in others):
        found["additionalProperties"] = False
    return found


def _combines(value: Any) -> bool:
    """Whether an ``allOf`` of several is anywhere in the schema."""
    if isinstance(value, Mapping):
        parts = value.get("allOf")
        if isinstance(parts, list) and len(parts) > 1:
            return True
        return any(_combines(one) for one in value.values())
    return isinstance(value, list) and any(_combines(one) for one in value)
