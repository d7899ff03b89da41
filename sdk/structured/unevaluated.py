"""``unevaluatedProperties`` and ``unevaluatedItems``, rewritten for each way to be valid."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

from sdk.api.errors import RequestError
from sdk.structured.document import Document, Schema, also

#: Ways to be valid, of which each has its own properties. Each is a copy of the schema.
_MOST_WAYS = 64
#: Choices of ``anyOf`` that are also combined with each other.
_MOST_COMBINED = 3
_KEYWORDS = ("unevaluatedProperties", "unevaluatedItems")


class _Way(NamedTuple):
    """A way to be valid: what shows that a value takes it, and what is evaluated then."""

    shown: tuple[Any, ...] = ()
    names: frozenset[str] = frozenset()
    patterns: frozenset[str] = frozenset()
    all_properties: bool = False
    first: int = 0
    all_items: bool = False
    contained: tuple[Any, ...] = ()

    def __and__(self, other: _Way) -> _Way:
        return _Way(
            self.shown + other.shown,
            self.names | other.names,
            self.patterns | other.patterns,
            self.all_properties or other.all_properties,
            max(self.first, other.first),
            self.all_items or other.all_items,
            self.contained + other.contained,
        )

    @property
    def evaluated(self) -> tuple[Any, ...]:
        return self[1:]


def rewrite_unevaluated(schema: Schema, document: Document) -> None:
    """A value is valid if some way to be valid evaluates all that the keywords do not allow."""
    rules = {key: schema.pop(key) for key in _KEYWORDS if key in schema}
    if all(rule in (True, {}) for rule in rules.values()):
        return
    ways = _distinct(_ways(schema, document, ()))
    closed = [{"allOf": [*way.shown, _closed(way, rules)]} for way in ways]
    also(schema, closed[0] if len(closed) == 1 else {"anyOf": closed})


def _closed(way: _Way, rules: Schema) -> Schema:
    """What is not evaluated fits the rules."""
    closed: Schema = {}
    if "unevaluatedProperties" in rules and not way.all_properties:
        closed["properties"] = dict.fromkeys(sorted(way.names), True)
        closed["patternProperties"] = dict.fromkeys(sorted(way.patterns), True)
        closed["additionalProperties"] = rules["unevaluatedProperties"]
    if "unevaluatedItems" in rules and not way.all_items:
        rest = rules["unevaluatedItems"]
        closed["prefixItems"] = [True] * way.first
        closed["items"] = {"anyOf": [rest, *way.contained]} if way.contained else rest
    return closed


def _ways(schema: Any, document: Document, inside: tuple[str, ...]) -> list[_Way]:
    """The ways to fit a schema. ``inside``: references that lead to it."""
    document.work(len(inside))
    if not isinstance(schema, dict):
        return [_Way()]
    ways = [_own(schema, document)]
    if isinstance(schema.get("$ref"), str):
        reference = schema["$ref"]
        if reference in inside:
            raise RequestError(
                f"json: unevaluatedProperties and unevaluatedItems are not supported where $ref "
                f"{reference!r} is part of itself"
            )
        ways = _both(ways, _ways(document.target(reference), document, (*inside, reference)))
    for part in schema.get("allOf", ()):
        ways = _both(ways, _ways(part, document, inside))
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            options = [_shown(option, document, inside) for option in schema[keyword]]
            ways = _both(ways, _merged(_some(options, keyword == "anyOf")))
    if "if" in schema:
        ways = _both(ways, _merged(_conditional(schema, document, inside)))
    for keyword in ("dependentSchemas", "dependencies"):
        for name, rule in schema.get(keyword, {}).items():
            if isinstance(rule, dict):
                present = _Way(({"type": "object", "required": [name]},))
                ways = _both(ways, [_Way(), *_both([present], _ways(rule, document, inside))])
    return ways


def _own(schema: Schema, document: Document) -> _Way:
    """What the keywords of one schema evaluate themselves."""
    contained = "contains" in schema and document.contains_evaluates
    return _Way(
        (),
        frozenset(schema.get("properties", ())),
        frozenset(schema.get("patternProperties", ())),
        "additionalProperties" in schema or "unevaluatedProperties" in schema,
        len(schema.get("prefixItems", ())),
        "items" in schema or "unevaluatedItems" in schema,
        (schema["contains"],) if contained else (),
    )


def _shown(schema: Any, document: Document, inside: tuple[str, ...]) -> list[_Way]:
    """The ways to fit a schema that not every value fits."""
    if schema is False:
        return []
    return _both([_Way((schema,))], _ways(schema, document, inside))


def _conditional(schema: Schema, document: Document, inside: tuple[str, ...]) -> list[_Way]:
    fits = _shown(schema["if"], document, inside)
    fits = _both(fits, _ways(schema.get("then", True), document, inside))
    fails = [_Way(({"not": schema["if"]},))]
    fails = _both(fails, _ways(schema.get("else", True), document, inside))
    return fits + fails


def _some(options: list[list[_Way]], combined: bool) -> list[_Way]:
    """Ways to fit one of several schemas, or also several of them."""
    found = [way for option in options for way in option]
    if combined and len(options) <= _MOST_COMBINED:
        for size in range(2, len(options) + 1):
            for chosen in itertools.combinations(options, size):
                both = [_Way()]
                for option in chosen:
                    both = _both(both, option)
                found += both
    return found


def _both(first: list[_Way], second: list[_Way]) -> list[_Way]:
    return _distinct(one & other for one in first for other in second)


def _distinct(ways: Iterable[_Way]) -> list[_Way]:
    """Ways that evaluate different things. One that evaluates nothing needs nothing to show it."""
    found: list[_Way] = []
    for way in ways:
        if not any(way.evaluated):
            way = _Way()
        if way not in found:
            found.append(way)
        if len(found) > _MOST_WAYS:
            raise RequestError(
                "json: unevaluatedProperties and unevaluatedItems are not supported where more "
                f"than {_MOST_WAYS} combinations of anyOf, oneOf and if are valid"
            )
    return found


def _merged(ways: list[_Way]) -> list[_Way]:
    """Ways of which every value takes one: if all evaluate the same, none has to be shown."""
    if ways and all(way.evaluated == ways[0].evaluated for way in ways):
        return [ways[0]._replace(shown=())]
    return ways
