"""How many tokens complete a text at most, whatever its state is: from the schema or pattern alone.

For JSON this is the smallest value, and for each level what a begun part takes more than the
smallest one. A schema that refers to itself has no such sum: there every open bracket counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from sdk.structured.document import ANNOTATIONS, Schema, schemas_in

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
#: Keywords of objects and arrays.
_OBJECT = ("properties", "patternProperties", "additionalProperties", "required", "minProperties")
#: Keywords of several parts that hold for one value, and those that restrict its text.
_OF_SEVERAL = {"allOf", "anyOf", "oneOf", "$ref", "$defs"}
_OF_TEXT = {"pattern", "format", "multipleOf"}
_ARRAY = ("items", "prefixItems", "additionalItems", "minItems", "maxItems")
#: Characters that JSON writes as they are; others take up to six (``\\u001f``), or bytes of UTF-8.
_PLAIN = sorted({chr(code) for code in range(32, 127)} - {'"', "\\"})
_ESCAPED = 6
#: A value of any type is completed by at most this many tokens (the rest of an escape, a quote, a
#: colon, a value), and by this many for each open bracket.
_FREE, _PER_BRACKET = 16, 2
#: What the rest of a string may take more: of a format, and of an escape or a character.
_FORMAT, _BEGUN = 64, 8
#: Bytes of UTF-8 that complete a character.
_CHARACTER = 3
#: Tokens of values of these formats; one for each character.
_FORMATS = {"uuid": 36, "ipv4": 15, "ipv6": 39, "email": 32, "uri": 16, "duration": 8}


class Bound(NamedTuple):
    """``tokens``, and ``per_bracket`` more for each bracket that was opened, complete a text at
    most, whatever its state is. 0 tokens: nothing is known."""

    tokens: int = 0
    per_bracket: int = 0

    def after(self, brackets: int) -> int:
        """The tokens that complete a text with this many opening brackets at most; 0: unknown."""
        return self.tokens + self.per_bracket * brackets


def longest_completion(schema: Schema, count_tokens: Callable[[str], int]) -> Bound:
    """``count_tokens``: the tokens of a text."""
    try:
        if not _is_sure(schema):
            return Bound()
        bound = _Bound(schema, count_tokens)
        bound.of(schema)
        if bound.recursive:  # what one object, array or value needs, for each that may be open
            size = min(bound.largest, _MOST)
            return Bound(2 * size, size)
        return Bound(min(bound.begun(schema), _MOST), _PER_BRACKET if bound.free else 0)
    except RecursionError:  # definitions that refer to one another hundreds of times
        return Bound()


def _is_sure(root: Schema) -> bool:
    """Whether sizes of parts tell those of the whole. They do not where names of properties have
    patterns, where patterns of two parts hold for one value, and where a part has no value that
    ends: an answer must not begin it."""
    definitions = root.get("$defs", {})
    parts = {"#": root, **{f"#/$defs/{name}": one for name, one in definitions.items()}}
    every = [schema for one in parts.values() for schema in schemas_in(one)]
    if any("patternProperties" in schema for schema in every):
        return False
    known: dict[str, bool] = {}
    if any(_meet(schema, parts, known) for schema in every):
        return False
    return _all_end(every, parts)


def _meet(schema: Schema, parts: Schema, known: dict[str, bool]) -> bool:
    """Whether two parts that hold for one value may both restrict its text."""
    together: list[Any] = [{key: schema[key] for key in schema.keys() - _OF_SEVERAL}]
    together += _array(schema.get("allOf"))
    together += [{"anyOf": schema[key]} for key in ("anyOf", "oneOf") if key in schema]
    if "$ref" in schema:
        together.append({"$ref": schema["$ref"]})
    if len(together) < 3 and len(together[0].keys() - ANNOTATIONS) == 0:
        return False
    return sum(_restricts(one, parts, known) for one in together) > 1


def _restricts(schema: Any, parts: Schema, known: dict[str, bool]) -> bool:
    """Whether a pattern, a format or a multiple is somewhere in a schema."""
    for one in schemas_in(schema):
        if not _OF_TEXT.isdisjoint(one):
            return True
        reference = one.get("$ref")
        if isinstance(reference, str):
            if reference not in known:
                known[reference] = False
                known[reference] = _restricts(parts.get(reference), parts, known)
            if known[reference]:
                return True
    return False


def _all_end(every: list[Schema], parts: Schema) -> bool:
    """Whether each part has a value that does not contain itself without end."""
    ending: set[str] = set()
    while True:
        found = {name for name, one in parts.items() if _ends(one, ending)}
        if found == ending:
            break
        ending = found
    return len(ending) == len(parts)


def _ends(schema: Any, ending: set[str]) -> bool:
    """Whether a schema has a value that ends, if those that references in ``ending`` name do."""
    if not isinstance(schema, dict):
        return True
    if isinstance(schema.get("$ref"), str) and schema["$ref"] not in ending:
        return False
    if not all(_ends(one, ending) for one in _array(schema.get("allOf"))):
        return False
    for key in ("anyOf", "oneOf"):
        if _array(schema.get(key)) and not any(_ends(one, ending) for one in schema[key]):
            return False
    properties, others = _object(schema.get("properties")), schema.get("additionalProperties")
    needed = [properties.get(name, others) for name in _array(schema.get("required"))]
    if _number(schema.get("minItems")):
        needed += [*_array(schema.get("prefixItems")), schema.get("items")]
    ends = all(_ends(one, ending) for one in needed)
    return ends or _may_be_other(schema)


def _may_be_other(schema: Schema) -> bool:
    """Whether a value may be neither an object nor an array."""
    kinds = schema.get("type", "string")
    return (
        not {kinds} <= {"object", "array"}
        if isinstance(kinds, str)
        else bool({*kinds} - {"object", "array"})
    )


def longest_match(pattern: str) -> Bound:
    """For a text that is one match of a pattern. Each character may take a token."""
    _, rest = _lengths_of_pattern(pattern)
    return Bound(min(rest + _CHARACTER, _MOST))


def _lengths_of_pattern(pattern: str) -> tuple[int, int]:
    """The shortest match, and the characters that complete a begun one at most."""
    if not _ONLY_IN_RUST.search(pattern):
        try:
            return _lengths(_regex_parser.parse(pattern))
        except (re.error, ValueError, OverflowError, RecursionError, _UnknownNode):
            pass
    longest = _longest_of_unknown(pattern)
    return longest, longest


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
        #: By the id of a schema. None while references are read: sizes are not final then.
        self._sizes: dict[int, int] | None = None
        self._begun: dict[int, int] = {}
        #: Schemas that may be merged with others. Those may require what these only describe.
        self._merged: dict[int, Schema] = {}
        self._find_merged()
        every = self._merged.values()
        self._required = {name for one in every for name in _array(one.get("required"))}
        self._elements = max((_number(one.get("minItems")) for one in every), default=0)
        self.largest = 0
        self.recursive = False
        self.free = False  # whether a part may be any JSON

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
        if self._sizes is None:
            return self._size(schema)
        if id(schema) not in self._sizes:
            self._sizes[id(schema)] = self._size(schema)
        return self._sizes[id(schema)]

    def begun(self, schema: Any) -> int:
        """The tokens that complete a value of a schema, whatever its state is, or more."""
        if not isinstance(schema, dict):
            self.free |= schema is not False
            return _FREE
        if self._sizes is None:
            self._sizes = {}
        if id(schema) not in self._begun:
            more = max(self._more_of_object(schema), self._more_of_array(schema))
            more += sum(map(self._more, _array(schema.get("allOf"))))
            for name in ("anyOf", "oneOf"):
                more += max(map(self._more, _array(schema.get(name))), default=0)
            if isinstance(schema.get("$ref"), str):
                more += self._more(self._resolved(schema["$ref"]))
            self._begun[id(schema)] = self.of(schema) + more + self._more_of_scalar(schema)
        return self._begun[id(schema)]

    def _more(self, schema: Any) -> int:
        """What completing a value takes more than the smallest value."""
        return self.begun(schema) - self.of(schema)

    def _more_of_object(self, schema: Schema) -> int:
        if not _allows(schema, "object"):
            return 0
        required = _array(schema.get("required"))
        named = patterns = 0  # a property may have both
        for name, value in _object(schema.get("properties")).items():
            size = self._more(value) if name in required else self.begun(value)
            named = max(named, _bytes(name) + _BEGUN + size)
        for value in _object(schema.get("patternProperties")).values():
            patterns = max(patterns, self.begun(value) + _BEGUN)
        others = self.begun(schema.get("additionalProperties", True)) + _BEGUN
        return max(named + patterns, others)

    def _more_of_array(self, schema: Schema) -> int:
        if not _allows(schema, "array"):
            return 0
        first = [self.begun(item) for item in _array(schema.get("prefixItems"))]
        rest = schema.get("items", True)
        first += [self.begun(item) for item in _array(rest)]
        if isinstance(rest, list):
            rest = schema.get("additionalItems", True)
        has_first = _number(schema.get("minItems")) > 0
        return max([*first, self._more(rest) if has_first else self.begun(rest) + 2])

    def _more_of_scalar(self, schema: Schema) -> int:
        """Of a literal or an escape that was begun with other tokens than the usual ones."""
        texts = [*_array(schema.get("enum")), *([schema["const"]] if "const" in schema else [])]
        begun = max(map(_bytes, texts), default=0)
        return _BEGUN + max(begun, _FORMAT if "format" in schema else 0)

    def _size(self, schema: Schema) -> int:
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
            total += sum(_lengths_of_pattern(pattern))
        for name in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"):
            if name in schema:
                total += len(repr(schema[name])) + 8
        return total

    def _reference(self, reference: Any) -> int:
        if not isinstance(reference, str):
            return 0
        if self._known.get(reference) == 0:
            self.recursive = True
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


def _allows(schema: Schema, kind: str) -> bool:
    """Whether a value may be of a type. Where parts say what it may be, they are read instead."""
    if "type" in schema:
        return kind in (schema["type"], *_array(schema["type"]))
    of_kind = _OBJECT if kind == "object" else _ARRAY
    if any(name in schema for name in of_kind):
        return True
    return not any(name in schema for name in ("enum", "const", "allOf", "anyOf", "oneOf", "$ref"))


def _bytes(value: Any) -> int:
    """The bytes of a value as JSON, of which each may be a token."""
    return len(json.dumps(value, ensure_ascii=True))


def _object(value: Any) -> Schema:
    return value if isinstance(value, dict) else {}


def _array(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _number(value: Any) -> int:
    return int(value) if isinstance(value, int | float) and value > 0 else 0
