"""How many tokens complete a JSON text at most, whatever its state is: from the schema alone."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from sdk.structured.document import Schema, schemas_in

#: A bound beyond which it is of no use.
_MOST = 2**30
#: Python's parser of patterns, which has no other name. Its trees are documented by its output.
_regex_parser: Any = vars(re)["_parser"]
#: Classes in classes, and differences of classes: Python reads them as characters, and warns.
_ONLY_IN_RUST = re.compile(r"\[[^\]]*(?:\[|--|&&|~~|\|\|)")
_CATEGORIES = {
    "CATEGORY_DIGIT": r"\d",
    "CATEGORY_NOT_DIGIT": r"\D",
    "CATEGORY_SPACE": r"\s",
    "CATEGORY_NOT_SPACE": r"\S",
    "CATEGORY_WORD": r"\w",
    "CATEGORY_NOT_WORD": r"\W",
}
#: Characters that JSON writes as they are; others take up to six (``\\u001f``), or bytes of UTF-8.
_PLAIN = sorted({chr(code) for code in range(32, 127)} - {'"', "\\"})
_ESCAPED = 6
#: Tokens of values of these formats; one for each character.
_FORMATS = {"uuid": 36, "ipv4": 15, "ipv6": 39, "email": 32, "uri": 16, "duration": 8}


def longest_completion(schema: Schema, count_tokens: Callable[[str], int]) -> int:
    """Tokens that one object, array or value needs at most: its required content, and its end.

    The text of a state with k open objects and arrays is completed by at most k + 1 times as many.
    ``count_tokens``: the tokens of a text.
    """
    bound = _Bound(schema, count_tokens)
    bound.of(schema)
    return min(bound.largest, _MOST)


def longest_match(pattern: str) -> int:
    """Characters that complete a match of a pattern at most, whatever part of it has matched.

    The pattern may be unanchored or repeated by its surroundings: the longest rest of a match, and
    the shortest match.
    """
    if _ONLY_IN_RUST.search(pattern):
        return _longest_of_unknown(pattern)
    try:
        least, rest = _lengths(_regex_parser.parse(pattern))
    except (re.error, ValueError, OverflowError, RecursionError, _UnknownNode):
        return _longest_of_unknown(pattern)
    return min(least + rest, _MOST)


class _UnknownNode(Exception):
    """Part of a pattern that has no bound here."""


def _lengths(nodes: Any) -> tuple[int, int]:
    """The shortest match of a sequence, and what completes a begun match at most."""
    least = rest = 0
    for kind, value in reversed(list(nodes)):
        own_least, own_rest = _lengths_of_node(str(kind), value)
        rest = max(rest, own_rest + least)
        least += own_least
    return least, rest


def _lengths_of_node(kind: str, value: Any) -> tuple[int, int]:
    if kind in ("LITERAL", "NOT_LITERAL", "ANY", "IN"):
        size = 1 if any(_matches(kind, value, ord(one)) for one in _PLAIN) else _ESCAPED
        return size, size
    if kind in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        low, _, inner = value
        least, rest = _lengths(inner)
        return int(low) * least, rest + max(int(low) - 1, 0) * least
    if kind == "BRANCH":
        found = [_lengths(branch) for branch in value[1]]
        return min(least for least, _ in found), max(rest for _, rest in found)
    if kind in ("SUBPATTERN", "ATOMIC_GROUP"):
        return _lengths(value[-1] if kind == "SUBPATTERN" else value)
    if kind == "AT":
        return 0, 0
    raise _UnknownNode(kind)


def _matches(kind: str, value: Any, code: int) -> bool:
    """Whether a node of one character matches a character."""
    if kind == "LITERAL":
        return bool(code == value)
    if kind == "NOT_LITERAL":
        return bool(code != value)
    if kind == "RANGE":
        return bool(value[0] <= code <= value[1])
    if kind == "CATEGORY":
        return re.match(_CATEGORIES[str(value)], chr(code)) is not None
    if kind == "IN":
        negated = str(value[0][0]) == "NEGATE"
        return negated != any(_matches(str(one), x, code) for one, x in value[negated:])
    return True


def _longest_of_unknown(pattern: str) -> int:
    """Each position of a pattern once, times its repeats, which may be nested."""
    product = 1
    for number in re.findall(r"\{(\d{1,9})", pattern):
        product = min(product * max(int(number), 1), _MOST)
    return min(4 * len(pattern) * product, _MOST)


class _Bound:
    def __init__(self, root: Schema, count_tokens: Callable[[str], int]) -> None:
        self._root = root
        self._count = count_tokens
        self._known: dict[str, int] = {}  # by reference; 0 while it is computed
        #: Schemas that may be merged with others. Those may require what these only describe.
        self._merged: dict[int, Schema] = {}
        self._find_merged()
        every = self._merged.values()
        self._required = {name for one in every for name in _array(one.get("required"))}
        self._elements = max((_number(one.get("minItems")) for one in every), default=0)
        self.largest = 0

    def _find_merged(self) -> None:
        pending: list[Any] = []
        for one in (self._root, *_object(self._root.get("$defs")).values()):
            for found in schemas_in(one):
                lists = any(key in found for key in ("allOf", "anyOf", "oneOf"))
                if lists or ("$ref" in found and len(found) > 1):
                    pending.append(found)
        while pending:
            for found in schemas_in(pending.pop()):
                if id(found) not in self._merged:
                    self._merged[id(found)] = found
                    if isinstance(found.get("$ref"), str):
                        pending.append(self._resolved(found["$ref"]))

    def of(self, schema: Any) -> int:
        """The tokens of the smallest value of a schema, or more."""
        if not isinstance(schema, dict):
            return 2
        total = 4 + self._scalar(schema) + self._reference(schema.get("$ref"))
        properties = _object(schema.get("properties"))
        sizes = {name: self.of(value) for name, value in properties.items()}
        others = [self.of(value) for value in _object(schema.get("patternProperties")).values()]
        others.append(self.of(schema.get("additionalProperties")))
        merged = id(schema) in self._merged
        required = dict.fromkeys(_array(schema.get("required")))
        if merged:
            required.update(dict.fromkeys(name for name in sizes if name in self._required))
        for name in required:
            total += self._named(name, sizes.get(name, max(others)))
        least = _number(schema.get("minProperties"))
        total += least * (max(others) + 4)
        items = [self.of(item) for item in _array(schema.get("prefixItems"))]
        rest = schema.get("items")
        items += [self.of(item) for item in _array(rest)]
        each = max(self.of(rest), self.of(schema.get("additionalItems")))
        least = max(_number(schema.get("minItems")), self._elements if merged else 0)
        total += sum(items) + least * (each + 2)
        total += sum(self.of(item) for item in _array(schema.get("allOf")))
        for name in ("anyOf", "oneOf"):
            total += max([self.of(item) for item in _array(schema.get(name))], default=0)
        total = min(total, _MOST)
        # One more property or element, which is not required, may have begun.
        begun = [self._named(name, size) for name, size in sizes.items()]
        self.largest = max(self.largest, total + max([*begun, max(others) + 8, each + 2, *items]))
        return total

    def _named(self, name: str, size: int) -> int:
        """The tokens of a property."""
        return self._count(json.dumps(name)) + 3 + size

    def _scalar(self, schema: Schema) -> int:
        texts = [*_array(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
        total = max([self._count(json.dumps(text)) for text in texts], default=0)
        total += _number(schema.get("minLength")) + _FORMATS.get(str(schema.get("format")), 0)
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            total += longest_match(pattern)
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            if name in schema:
                total += len(repr(schema[name])) + 8
        return total

    def _reference(self, reference: Any) -> int:
        if not isinstance(reference, str):
            return 0
        if reference not in self._known:
            self._known[reference] = 0  # the smallest value does not contain itself
            self._known[reference] = self.of(self._resolved(reference))
        return self._known[reference]

    def _resolved(self, reference: str) -> Any:
        found: Any = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            found = found.get(part) if isinstance(found, dict) else None
        return found


def _object(value: Any) -> Schema:
    return value if isinstance(value, dict) else {}


def _array(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> int:
    return int(value) if isinstance(value, int | float) and value > 0 else 0
