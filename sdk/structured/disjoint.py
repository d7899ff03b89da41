"""Whether two schemas certainly have no value in common."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

from sdk.structured.document import TYPES, Document
from sdk.structured.negation import type_of

#: Properties inside properties, and references after references, that are looked at.
_MOST_STEPS = 8
#: Properties that are tried to tell two schemas apart.
_MOST_NAMES = 16


@dataclass(slots=True)
class _Facts:
    """What every value of a schema fulfils.

    ``values``: texts of the only possible values; ``None``: there may be others. ``closed``: it has
    no properties but those in ``properties``.
    """

    types: set[str] = field(default_factory=lambda: set(TYPES))
    values: dict[str, Any] | None = None
    required: set[str] = field(default_factory=set)
    properties: dict[str, list[Any]] = field(default_factory=dict)
    closed: list[set[str]] = field(default_factory=list)
    least: float = -math.inf
    most: float = math.inf
    choices: list[list[Any]] = field(default_factory=list)


def disjoint(first: Any, second: Any, document: Document, steps: int = 0) -> bool:
    """Whether no value fits both schemas; ``False`` if that is not certain."""
    document.work()
    if first is False or second is False:
        return True
    if not isinstance(first, dict) or not isinstance(second, dict) or steps > _MOST_STEPS:
        return False
    one, other = _Facts(), _Facts()
    _collect(one, first, document, 0)
    _collect(other, second, document, 0)
    if any(_all_disjoint(choice, second, document, steps) for choice in one.choices):
        return True
    if any(_all_disjoint(choice, first, document, steps) for choice in other.choices):
        return True
    return _contradict(one, other, document, steps)


def telling_names(first: Any, second: Any, document: Document) -> list[str]:
    """Properties of a schema with which no value fits the other one, at most 16."""
    facts = _Facts()
    _collect(facts, first, document, 0)
    names = list(facts.properties)[:_MOST_NAMES] if facts.types == {"object"} else []
    return [
        name
        for name in names
        if disjoint({"allOf": [first, {"required": [name]}]}, second, document)
    ]


def _all_disjoint(options: list[Any], schema: Any, document: Document, steps: int) -> bool:
    return all(disjoint(option, schema, document, steps + 1) for option in options)


def _collect(facts: _Facts, schema: Any, document: Document, depth: int) -> None:
    if not isinstance(schema, dict) or depth > _MOST_STEPS:
        return
    document.work()
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        facts.types &= {"number" if name == "integer" else name for name in named}
    for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if isinstance(values, list):
            texts = {_text(value): value for value in values}
            known = texts if facts.values is None else facts.values
            facts.values = {text: value for text, value in known.items() if text in texts}
    facts.required |= set(schema.get("required", ()))
    properties = schema.get("properties", {})
    for name, value in properties.items():
        facts.properties.setdefault(name, []).append(value)
    if schema.get("additionalProperties") is False and not schema.get("patternProperties"):
        facts.closed.append(set(properties))
    facts.least = max(facts.least, schema.get("minimum", -math.inf))
    facts.most = min(facts.most, schema.get("maximum", math.inf))
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            facts.choices.append(schema[keyword])
    if "$ref" in schema:
        _collect(facts, document.target(schema["$ref"]), document, depth + 1)
    for part in schema.get("allOf", ()):
        _collect(facts, part, document, depth + 1)


def _contradict(one: _Facts, other: _Facts, document: Document, steps: int) -> bool:
    types = one.types & other.types
    for facts in (one, other):
        if facts.values is not None:
            types &= {type_of(value) for value in facts.values.values()}
    if one.values is not None and other.values is not None:
        return not {t for t in one.values.keys() & other.values if type_of(one.values[t]) in types}
    if types <= {"number"} and max(one.least, other.least) > min(one.most, other.most):
        return True
    return types <= {"object"} and (
        not types
        or any(
            disjoint(first, second, document, steps + 1)
            for name in sorted(one.required | other.required)
            for first in _values_of(one, name)
            for second in _values_of(other, name)
        )
    )


def _values_of(facts: _Facts, name: str) -> list[Any]:
    """Schemas that the value of a property fits, if there is one."""
    if any(name not in names for names in facts.closed):
        return [False]
    return facts.properties.get(name, [True])


def _text(value: Any) -> str:
    """A text that equal values share: 1.0 is 1 in JSON Schema, and ``true`` is not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list):
        return "[" + ",".join(map(_text, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(k)}:{_text(v)}" for k, v in sorted(value.items())) + "}"
    return json.dumps(value)
