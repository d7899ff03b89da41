"""Keywords of JSON Schema that llguidance lacks, in terms of those it has.

A rewriting never accepts a value that the schema rejects; docs/structured.md says where it accepts
fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr
from sdk.structured.arrays import rewrite_contains, rewrite_unique
from sdk.structured.disjoint import disjoint, telling_names
from sdk.structured.document import (
    ANNOTATIONS,
    OF_LIST,
    OF_OBJECT,
    OF_SCHEMA,
    Document,
    Schema,
    also,
    is_free,
    schemas_in,
    too_deep,
)
from sdk.structured.formats import rewrite_format
from sdk.structured.limits import check_size
from sdk.structured.negation import negation
from sdk.structured.numbers import rewrite_numbers
from sdk.structured.property_patterns import rewrite_patterns
from sdk.structured.unevaluated import rewrite_unevaluated

#: Parts of a ``oneOf`` that are compared with each other: 64 are 2,016 pairs.
_MOST_OPTIONS = 64
#: Keywords next to ``oneOf`` that help to tell its parts apart.
_OF_ONE_OF = ("type", "required", "properties")

#: llguidance's options for the whitespace of ``json.dumps``, or none. Its default is unlimited
#: whitespace, which invites small models to write nothing else.
WHITESPACE = {"item_separator": ", ?", "key_separator": ": ?", "whitespace_flexible": False}
#: Keywords next to which ``propertyNames`` is a condition of its own.
_OTHER_PROPERTIES = {
    *("properties", "patternProperties", "required", "allOf", "anyOf", "oneOf", "$ref"),
}
_LEAST = ("minItems", "minLength", "minProperties", "minContains")
_INTEGERS = (*_LEAST, "maxItems", "maxLength", "maxProperties", "maxContains")
#: The longest text or array that may be required: an answer has up to 4,096 tokens. Longer ones
#: than the second number, which the library reads as 32 bits with a sign, are left out.
_MOST_LEAST, _MOST_SIZE = 10_000, 2**31 - 1


def rewritten(schema: Mapping[str, Any], closed: bool = False) -> Schema:
    """A copy of a schema, in keywords that llguidance has.

    ``closed``: objects that list properties have no others.
    :raises RequestError: a keyword would be enforced wrongly or far too slowly.
    """
    try:
        document = Document(schema)
        if closed:
            parts = {"#": document.root}
            parts |= {f"#/$defs/{name}": one for name, one in document.definitions.items()}
            for reference in parts.keys() - _references_in_place(parts.values()):
                _close(parts[reference])
        root: Schema = _rewritten(document.root, document)
        definitions: Schema = {}
        while missing := [name for name in document.definitions if name not in definitions]:
            for name in missing:
                definitions[name] = _rewritten(document.definitions[name], document)
    except RequestError:
        raise
    except RecursionError as error:
        raise too_deep() from error
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise RequestError(f"json: it is not a valid JSON Schema: {error}") from error
    if definitions:
        root["$defs"] = definitions
    check_size(root)
    return root


def _in_place(schema: Schema) -> bool:
    """Whether several parts of a schema hold for one object."""
    several = [key for key in ("allOf", "anyOf", "oneOf", "$ref") if key in schema]
    return "allOf" in schema or (bool(several) and "properties" in schema)


def _references_in_place(schemas: Iterable[Any]) -> set[str]:
    """Definitions that are a part of other objects: they must not forbid what is in the rest."""
    every = [found for one in schemas for found in schemas_in(one)]
    together = [one for schema in every if _in_place(schema) for one in (schema, *_parts(schema))]
    return {one["$ref"] for one in together if isinstance(one.get("$ref"), str)}


def _parts(schema: Schema) -> list[Schema]:
    lists = [schema.get(key) for key in ("allOf", "anyOf", "oneOf")]
    return [one for found in lists for one in found or () if isinstance(one, dict)]


def _close(schema: Any, part: bool = False) -> None:
    """Forbid additional properties; not in conditions, which list only what they depend on.

    ``part``: the schema is a part of an object, which forbids those that no part lists.
    """
    if not isinstance(schema, dict):
        return
    together = _in_place(schema)
    if not part and together and "additionalProperties" not in schema:
        schema.setdefault("unevaluatedProperties", False)
    elif not part and "properties" in schema:
        schema.setdefault("additionalProperties", False)
    for item in _parts(schema):
        _close(item, part or together)
    for key in ("items", "additionalProperties"):
        _close(schema.get(key))
    for item in schema.get("prefixItems", ()):
        _close(item)
    for key in ("properties", "patternProperties"):
        for item in schema.get(key, {}).values():
            _close(item)


def _rewritten(schema: Any, document: Document, depth: int = 0) -> Any:
    """A schema and those inside it. The schemas inside are as the caller wrote them until the
    outer one is done, because a rewritten schema may accept fewer values."""
    document.work(depth)
    if not isinstance(schema, dict):
        return schema
    found = dict(schema)
    for rewrite in _REWRITE:
        rewrite(found, document)
    for key in OF_SCHEMA:
        if isinstance(found.get(key), dict):
            found[key] = _rewritten(found[key], document, depth + 1)
    for key in OF_LIST:
        if isinstance(found.get(key), list):
            found[key] = [_rewritten(item, document, depth + 1) for item in found[key]]
    for key in OF_OBJECT:
        if isinstance(found.get(key), dict):
            items = found[key].items()
            found[key] = {name: _rewritten(item, document, depth + 1) for name, item in items}
    return found


def _check_sizes(schema: Schema, _: Document) -> None:
    """Lengths and counts: 2.0 is a valid integer in JSON Schema."""
    for name in _INTEGERS:
        value = schema.get(name)
        if value is None:
            continue
        whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
        if isinstance(value, bool) or not whole or value < 0:
            raise RequestError(
                f"json: {name}: expected a whole number from 0 on, found {safe_repr(value)}"
            )
        schema[name] = int(value) if name in _LEAST else min(int(value), _MOST_SIZE)
        if name in _LEAST and value > _MOST_LEAST:
            raise RequestError(
                f"json: {name} {safe_repr(value)} is not supported: expected at most {_MOST_LEAST}"
            )


def _check_min_properties(schema: Schema) -> None:
    """Additional properties may have equal names, of which a reader keeps one."""
    least = schema.get("minProperties")
    required = schema.get("required")
    certain = len(required) if isinstance(required, list) else 0
    if isinstance(least, int | float) and least > max(certain, 1):
        raise RequestError(
            f"json: minProperties {least} is not supported: only properties in 'required' are "
            "certain to be different; list them there"
        )


def _check(schema: Schema, _: Document) -> None:
    """Limits that llguidance does not have."""
    _check_min_properties(schema)


def _rewrite_not(schema: Schema, document: Document) -> None:
    if "not" not in schema:
        return
    opposite = negation(schema.pop("not"), document)
    if opposite is None:
        raise RequestError(
            "json: not is not supported here: no schema expresses the opposite of its keywords; "
            "say which values are allowed"
        )
    if opposite is not True:
        also(schema, opposite)


def _rewrite_if(schema: Schema, document: Document) -> None:
    """A value fits ``if`` and ``then``, or neither ``if`` nor what ``else`` forbids."""
    condition = schema.pop("if", None)
    fits, fails = schema.pop("then", True), schema.pop("else", True)
    if condition is None or (is_free(fits) and is_free(fails)):
        return
    if is_free(fits):
        also(schema, {"anyOf": [condition, fails]})
        return
    opposite = negation(condition, document)
    if opposite is None:
        raise RequestError(
            "json: if is not supported here: no schema expresses the opposite of its keywords; "
            "use const, enum, type or required in it"
        )
    also(schema, {"anyOf": [{"allOf": [condition, fits]}, {"allOf": [opposite, fails]}]})


def _rewrite_one_of(schema: Schema, document: Document) -> None:
    """Each part without the values of other parts that may overlap."""
    options = schema.get("oneOf")
    if not isinstance(options, list) or not 0 < len(options) <= _MOST_OPTIONS:
        return
    around = {key: schema[key] for key in _OF_ONE_OF if key in schema}
    parts = []
    for index, option in enumerate(options):
        inside = {"allOf": [around, option]}
        others = [
            _without(inside, other, document)
            for place, other in enumerate(options)
            if place != index and not disjoint(inside, other, document)
        ]
        if None in others:
            return  # llguidance may know that the parts do not overlap
        parts.append({"allOf": [option, *others]} if others else option)
    if "anyOf" in schema:
        del schema["oneOf"]
        also(schema, {"anyOf": parts})
        return
    # Properties come in the order of the keywords: the new one takes the place of the old one.
    items = list(schema.items())
    schema.clear()
    for key, value in items:
        schema.update({"anyOf": parts} if key == "oneOf" else {key: value})


def _without(schema: Any, other: Any, document: Document) -> Any:
    """A condition that values of ``schema`` fulfil only if they do not fit ``other``."""
    opposite = negation(other, document)
    required = [{"required": [name]} for name in telling_names(schema, other, document)]
    if not required or opposite is True:
        return opposite
    return {"anyOf": [*([] if opposite is None else [opposite]), *required]}


def _rewrite_dependencies(schema: Schema, _: Document) -> None:
    """If one property is present, others must be, or a schema must fit."""
    for keyword in ("dependencies", "dependentRequired", "dependentSchemas"):
        rules = schema.get(keyword)
        if not isinstance(rules, dict):
            continue
        del schema[keyword]
        for name, rule in rules.items():
            fits = {"required": rule} if isinstance(rule, list) else rule
            absent = {"properties": {name: False}}
            also(schema, {"anyOf": [absent, fits]})


def _rewrite_property_names(schema: Schema, document: Document) -> None:
    """Names become patterns of properties."""
    names = schema.get("propertyNames")
    if isinstance(names, dict) and names.keys() - ANNOTATIONS == {"$ref"}:
        names = document.target(names["$ref"])
    if names is None or names is True or names is False:
        schema.pop("propertyNames", None)
        also(schema, *([{"maxProperties": 0}] if names is False else []))
        return
    kinds = names.keys() - ANNOTATIONS - {"type"}
    if names.get("type", "string") != "string":
        return
    if "const" in kinds:
        names, kinds = {**names, "enum": [names["const"]]}, kinds - {"const"} | {"enum"}
    alone = not schema.keys() & _OTHER_PROPERTIES
    value = schema.get("additionalProperties", True) if alone else True
    rules: Schema = {"additionalProperties": False}
    if kinds == {"pattern"}:
        rules["patternProperties"] = {names["pattern"]: value}
    elif kinds == {"enum"}:
        rules["properties"] = {name: value for name in names["enum"] if isinstance(name, str)}
    elif kinds <= {"minLength", "maxLength"}:
        least, most = int(names.get("minLength", 0)), names.get("maxLength")
        times = f"{least},{'' if most is None else int(most)}"
        rules["patternProperties"] = {f"^(?s:.){{{times}}}$": value}
    elif kinds == {"not"} and (pattern := _only_pattern(negation(names["not"], document))):
        rules["patternProperties"] = {pattern: value}
    else:
        return
    del schema["propertyNames"]
    if alone:
        schema.update(rules)
    else:
        also(schema, rules)


def _only_pattern(schema: Any) -> str | None:
    """The pattern of the strings that fit an opposite, if it restricts them by one."""
    ways = schema.get("anyOf", [schema]) if isinstance(schema, dict) else []
    patterns = [way["pattern"] for way in ways if "pattern" in way]
    return patterns[0] if len(patterns) == 1 else None


#: In this order: the first ones read schemas inside that the others replace.
_REWRITE: tuple[Callable[[Schema, Document], None], ...] = (
    _check_sizes,
    rewrite_unevaluated,
    rewrite_contains,
    rewrite_unique,
    _rewrite_not,
    _rewrite_if,
    _rewrite_one_of,
    rewrite_format,
    _rewrite_dependencies,
    _rewrite_property_names,
    rewrite_patterns,
    rewrite_numbers,
    _check,
)
