"""``contains`` and ``uniqueItems`` in terms of the first elements of an array."""

from __future__ import annotations

import itertools
import math
from typing import Any

from sdk.api.errors import RequestError
from sdk.structured.disjoint import disjoint
from sdk.structured.document import Document, Schema, also, only
from sdk.structured.negation import POSITIONS, negation

#: Choices of positions for the elements that ``contains`` counts.
_MOST_CHOICES = 16
#: Arrays that are listed for ``uniqueItems``.
_MOST_ARRAYS = 256


def rewrite_contains(schema: Schema, document: Document) -> None:
    """At least ``minContains`` elements fit ``contains``, and at most ``maxContains``."""
    least, most = int(schema.pop("minContains", 1)), schema.pop("maxContains", math.inf)
    item = schema.pop("contains", None)
    if item is None or (least <= 0 and most == math.inf):
        return
    if least > most:
        also(schema, only("array", False))
    elif item is True or most == math.inf:
        limit = {} if most == math.inf else {"maxItems": int(most)}
        also(schema, only("array", {"anyOf": _positions(schema, item, least), **limit}))
    else:
        also(schema, only("array", _counted(schema, item, least, int(most), document)))


def _positions(schema: Schema, item: Any, least: int) -> list[Schema]:
    """Arrays in which ``least`` elements, near the beginning, fit a schema."""
    return [_at(chosen, item, True) for chosen in _choices(least, schema.get("maxItems", math.inf))]


def _choices(count: int, length: float) -> list[tuple[int, ...]]:
    """Sets of that many positions: as many of the first ones as :data:`_MOST_CHOICES` allows."""
    span = count
    while span < min(length, count + POSITIONS) and math.comb(span + 1, count) <= _MOST_CHOICES:
        span += 1
    return list(itertools.combinations(range(span), count))


def _at(chosen: tuple[int, ...], item: Any, other: Any) -> Schema:
    """Arrays whose elements at some positions fit ``item``; those between them fit ``other``."""
    length = chosen[-1] + 1 if chosen else 0
    first = [item if index in chosen else other for index in range(length)]
    return {"type": "array", "prefixItems": first, "minItems": length}


def _counted(schema: Schema, item: Any, least: int, most: int, document: Document) -> Schema:
    """Arrays in which ``least`` to ``most`` elements fit a schema, and the others do not."""
    other = negation(item, document)
    if other is None:
        return {"anyOf": _positions(schema, item, least), "maxItems": most}
    length = schema.get("maxItems", math.inf)
    every = [
        {**_at(chosen, item, other), "items": other}
        for count in range(least, min(most, least + POSITIONS) + 1)
        for chosen in _choices(count, length)
    ]
    return {"anyOf": every}


def rewrite_unique(schema: Schema, document: Document) -> None:
    """Elements differ: there is at most one, or they are of sets without a common value."""
    if not schema.pop("uniqueItems", False):
        return
    first, rest = schema.get("prefixItems", []), schema.get("items", True)
    length = min(schema.get("maxItems", math.inf), len(first) if rest is False else math.inf)
    if length <= 1:
        return
    if length <= len(first) or rest is False:
        pairs = itertools.combinations(first[: int(min(length, len(first)))], 2)
        if all(disjoint(one, other, document) for one, other in pairs):
            return
    sets = [_values(item, document) for item in first]
    arrays = _arrays(sets, _values(rest, document), schema.get("minItems", 0), length)
    if arrays is None:
        raise RequestError(
            "json: uniqueItems is not supported: expected maxItems 1, or items with few values "
            "(enum, const, boolean); list them, or remove it"
        )
    also(schema, only("array", {"enum": arrays}))


def _values(schema: Any, document: Document) -> list[Any] | None:
    """All values of a schema, if they are listed in it."""
    if isinstance(schema, dict) and schema.keys() == {"$ref"}:
        schema = document.target(schema["$ref"])
    if schema is False:
        return []
    if not isinstance(schema, dict):
        return None
    if schema.get("type") == "null":
        return [None]
    if schema.get("type") == "boolean" and "enum" not in schema and "const" not in schema:
        return [False, True]
    if "const" in schema:
        return [schema["const"]]
    return schema.get("enum")


def _arrays(
    first: list[list[Any] | None], rest: list[Any] | None, least: int, most: float
) -> list[list[Any]] | None:
    """The arrays of different values: in every order if they are few, else in that of ``rest``.

    Longer ones are left out where there are too many. ``None``: no array is long enough.
    """
    if first:
        return _products(first, least, most)
    if rest is None:
        return None
    rest = [value for index, value in enumerate(rest) if value not in rest[:index]]
    for chosen in (itertools.permutations, itertools.combinations):
        found: list[list[Any]] = []
        for size in range(int(min(most, len(rest))) + 1):
            if size >= least:
                found += map(list, itertools.islice(chosen(rest, size), _MOST_ARRAYS + 1))
            if len(found) > _MOST_ARRAYS:
                break
        else:
            return found or None
    shorter = [array for array in found if len(array) < size]
    return shorter if any(shorter) else None


def _products(first: list[list[Any] | None], least: int, most: float) -> list[list[Any]] | None:
    """Arrays of different values, one of each set; no elements follow them."""
    found: list[list[Any]] = []
    for size in range(int(least), int(min(most, len(first))) + 1):
        sets = first[:size]
        if any(values is None for values in sets):
            break
        products = itertools.product(*(values or [] for values in sets))
        every = list(itertools.islice(products, _MOST_ARRAYS + 1))
        if len(found) + len(every) > _MOST_ARRAYS:
            break
        found += [list(x) for x in every if all(a != b for a, b in itertools.combinations(x, 2))]
    return found if any(found) else None
