"""A JSON schema as one document: its references, and limits on the work that it causes."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr

Schema = dict[str, Any]

TYPES = ("array", "boolean", "null", "number", "object", "string")
#: Values nested deeper are rejected: the library's JSON reader stops at 128.
_MAX_DEPTH = 100
#: Schemas that are read or written while a document is rewritten; 50,000 take 0.5 s.
_MAX_WORK = 50_000
#: After this many of them (1 ms) other threads get the interpreter for a moment. One that waits for
#: it would only get it after 5 ms, and does so several times in a step. After the first 5,000,
#: which few schemas need, the pause is as long as the work, so that steps get the CPU too.
_TURN, _SHORT_PAUSE_S, _PAUSE_S, _SHORT_WORK = 100, 1e-4, 1e-3, 5000
#: Keywords whose values are schemas, lists of them, or objects of them. Elsewhere (``const``,
#: ``enum``, ``default``) the same words are data.
OF_SCHEMA = (
    *("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
OF_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
OF_OBJECT = ("properties", "patternProperties", "dependentSchemas", "dependencies")
#: Keywords that describe a value and do not restrict it.
ANNOTATIONS = {"title", "description", "$comment", "examples", "default"}
#: Keywords that name a schema or its version. References need them; nothing else does.
_DEFINITIONS = ("$defs", "definitions")
_NAMES = ("$id", "$anchor", "$dynamicAnchor", *_DEFINITIONS)
_DRAFT = re.compile(
    r"https?://json-schema\.org/(draft-0[4-7]|draft/2019-09|draft/2020-12)/schema#?"
)
#: Their keywords have other meanings. Schemas of unknown versions are read as 2020-12.
_TOO_OLD = re.compile(r"https?://json-schema\.org/draft-0[0-3]\b")


def schemas_in(schema: Any, depth: int = 0) -> Iterator[Schema]:
    """A schema and those inside it; not its definitions."""
    if depth > _MAX_DEPTH:
        raise too_deep()
    if not isinstance(schema, dict):
        return
    yield schema
    for item in children_of(schema):
        yield from schemas_in(item, depth + 1)


def children_of(schema: Schema) -> Iterator[Any]:
    for key in OF_SCHEMA:
        if isinstance(schema.get(key), dict):
            yield schema[key]
    for key in OF_LIST:
        if isinstance(schema.get(key), list):
            yield from schema[key]
    for key in OF_OBJECT:
        if isinstance(schema.get(key), dict):
            yield from schema[key].values()


def also(schema: Schema, *parts: Any) -> None:
    """Add conditions to a schema, whose lists may be shared."""
    schema["allOf"] = [*schema.get("allOf", ()), *parts]


def only(kind: str, schema: Any) -> Schema:
    """A condition for values of one type; other values are free."""
    return {"anyOf": [{"type": [name for name in TYPES if name != kind]}, schema]}


def is_free(schema: Any) -> bool:
    """Whether every value fits."""
    return schema is True or (isinstance(schema, dict) and not schema.keys() - ANNOTATIONS)


def _texts(value: Any) -> Iterator[str]:
    """The texts in a JSON value, keys of objects too."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            pending += [*one, *one.values()]
        elif isinstance(one, list):
            pending += one


def too_deep() -> RequestError:
    return RequestError(f"json: schemas are nested more than {_MAX_DEPTH} deep")


class Document:
    """A schema whose references are local, and the schemas that they name.

    ``root`` and ``definitions`` are as the caller wrote them, except that every reference is ``#``
    or ``#/$defs/<name>``. Nothing may change them in place: parts of them are shared.
    """

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.root: Schema = json.loads(json.dumps(schema))
        #: Every name of a property that the schema lists is among them.
        self.texts = frozenset(_texts(self.root))
        version = str(self.root.get("$schema"))
        if _TOO_OLD.match(version):
            raise RequestError(
                f"json: $schema {safe_repr(version)} is not supported: expected draft 4 or later"
            )
        draft = _DRAFT.fullmatch(version)
        self._draft = draft[1] if draft else ""
        self._old = self._draft.startswith("draft-0")
        recursive = ("$recursiveRef",) if self._draft == "draft/2019-09" else ()
        self._references = ("$ref", "$dynamicRef", *recursive)
        #: In 2019-09, ``unevaluatedItems`` applies to elements that match ``contains``, too.
        self.contains_evaluates = self._draft != "draft/2019-09"
        self.definitions: dict[str, Any] = {}
        self._names: dict[int, str] = {}  # of definitions, by the ids of their schemas
        self._resources: dict[str, Any] = {}
        self._anchors: dict[tuple[str, str], Any] = {}
        self._dynamic: dict[tuple[str, str], Any] = {}
        self._bases: dict[int, str] = {}  # base URIs, by the ids of schemas
        self._work = 0
        self._index(self.root, "", 0)
        for found in self._localized():
            self._modernize(found)

    def work(self, depth: int = 0) -> None:
        """Count one more schema that is read or written.

        :raises RequestError: there are too many, or they are nested too deep.
        """
        self._work += 1
        if self._work % _TURN == 0:
            time.sleep(_SHORT_PAUSE_S if self._work < _SHORT_WORK else _PAUSE_S)
        if depth > _MAX_DEPTH:
            raise too_deep()
        if self._work > _MAX_WORK:
            raise RequestError(
                f"json: it is too complex: rewriting it takes more than {_MAX_WORK} schemas; use "
                "fewer choices (anyOf, oneOf, if) inside one another"
            )

    def target(self, reference: Any) -> Any:
        """The schema that a reference names."""
        if reference == "#":
            return self.root
        return self.definitions.get(str(reference).removeprefix("#/$defs/"), True)

    def negated(self, reference: str) -> Schema:
        """A reference to what another reference does not allow."""
        name = reference.removeprefix("#/$defs/").removeprefix("#")
        if name.startswith("!"):
            return {"$ref": "#" if name == "!" else f"#/$defs/{name[1:]}"}
        self.definitions.setdefault(f"!{name}", {"not": self.target(reference)})
        return {"$ref": f"#/$defs/!{name}"}

    # References.

    def _index(self, schema: Any, base: str, depth: int) -> None:
        """Record the names of schemas, and in which resource each one lies."""
        if depth > _MAX_DEPTH:
            raise too_deep()
        if not isinstance(schema, dict) or id(schema) in self._bases:
            return
        name = schema.get("id" if self._draft == "draft-04" else "$id")
        if not isinstance(name, str) or (self._old and "$ref" in schema):
            name = ""
        if name and not name.startswith("#"):
            base = urldefrag(_joined(base, name)).url
        if schema is self.root or (name and not name.startswith("#")):
            # A name with two schemas is ambiguous.
            known = self._resources.setdefault(base, schema)
            self._resources[base] = schema if known is schema else None
        self._bases[id(schema)] = base
        if name.startswith("#"):  # an anchor in older drafts
            self._anchors[base, name[1:]] = schema
        if isinstance(anchor := schema.get("$anchor"), str):
            self._anchors[base, anchor] = schema
        if isinstance(anchor := schema.get("$dynamicAnchor"), str):
            self._anchors[base, anchor] = self._dynamic[base, anchor] = schema
        for item in children_of(schema):
            self._index(item, base, depth + 1)
        for keyword in _DEFINITIONS:
            if isinstance(schema.get(keyword), dict):
                for item in schema[keyword].values():
                    self._index(item, base, depth + 1)

    def _localized(self) -> list[Schema]:
        """The root, the schemas that it refers to, and those inside them, with local references."""
        done: dict[int, Schema] = {}
        pending = [self.root]
        while pending:
            for found in list(schemas_in(pending.pop())):
                if id(found) in done:
                    continue
                done[id(found)] = found
                for keyword in self._references:
                    if isinstance(found.get(keyword), str):
                        base = self._bases[id(found)]
                        target, name = self._resolved(base, found.pop(keyword), keyword)
                        if isinstance(target, dict):
                            _refer(found, self._local(target, name))
                            pending.append(target)
                        elif target is False:
                            also(found, False)
        return list(done.values())

    def _modernize(self, schema: Schema) -> None:
        """Drop names. Keywords of older drafts become those of 2020-12."""
        if self._old and "$ref" in schema:
            for key in schema.keys() - {"$ref", "$schema"}:
                del schema[key]
        for key in _NAMES:
            schema.pop(key, None)
        schema.pop("$schema", None)
        if "$recursiveRef" in self._references and schema.get("$recursiveAnchor"):
            raise RequestError("json: $recursiveAnchor is not supported; use $ref")
        if self._old:
            schema.pop("minContains", None)
            schema.pop("maxContains", None)
        if self._old or self._draft == "draft/2019-09":
            schema.pop("prefixItems", None)
        rest = schema.pop("additionalItems", None)
        if isinstance(schema.get("items"), list):
            schema["prefixItems"] = schema.pop("items")
            if rest is not None:
                schema["items"] = rest

    def _local(self, target: Any, name: str) -> str:
        """A reference to a schema."""
        if target is self.root:
            return "#"
        if id(target) not in self._names:
            name = unique = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII) or "schema"
            while unique in self.definitions:
                unique = f"{name}_{len(self.definitions)}"
            self.definitions[unique] = target
            self._names[id(target)] = unique
        return f"#/$defs/{self._names[id(target)]}"

    def _resolved(self, base: str, reference: str, keyword: str) -> tuple[Any, str]:
        """The schema that a reference means, and a name for it."""
        uri, fragment = urldefrag(_joined(base, reference))
        resource = self._resources.get(uri)
        if resource is None:
            raise RequestError(
                f"json: {keyword} {safe_repr(reference)} is not supported: expected a reference "
                "inside the schema, such as '#/$defs/name'"
            )
        fragment = unquote(fragment)
        name = re.split("[/:]", fragment or uri)[-1]
        if not fragment:
            return resource, name
        if fragment.startswith("/"):
            return self._pointed(resource, uri, fragment, reference), name
        if (uri, fragment) not in self._anchors:
            raise _missing(keyword, reference)
        found = self._anchors[uri, fragment]
        if keyword == "$dynamicRef" and (uri, fragment) in self._dynamic:
            return self._outermost(fragment), name
        return found, name

    def _outermost(self, anchor: str) -> Any:
        """The first ``$dynamicAnchor`` of that name that validation meets, if one is certain."""
        found = self._dynamic.get((self._bases[id(self.root)], anchor))
        if found is not None:
            return found
        every = [schema for (_, name), schema in self._dynamic.items() if name == anchor]
        if len(every) == 1:
            return every[0]
        raise RequestError(
            f"json: $dynamicRef {safe_repr(anchor)} is not supported: expected one $dynamicAnchor "
            f"of that name, or one in the root schema, found {len(every)}"
        )

    def _pointed(self, found: Any, base: str, pointer: str, reference: str) -> Any:
        for part in pointer.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(found, dict) and part in found:
                found = found[part]
            elif isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            else:
                raise _missing("$ref", reference)
            base = self._bases.get(id(found), base)
        if not isinstance(found, dict | bool):
            raise _missing("$ref", reference)
        self._index(found, base, 0)
        return found


def _missing(keyword: str, reference: str) -> RequestError:
    return RequestError(
        f"json: {keyword} {safe_repr(reference)} is not supported: the schema has no such part"
    )


def _joined(base: str, reference: str) -> str:
    """A reference made absolute; ``urljoin`` keeps the base only of URIs with a hierarchy."""
    if reference.startswith("#"):
        return urldefrag(base).url + reference
    try:
        return urljoin(base, reference)
    except ValueError:
        return reference


def _refer(schema: Schema, reference: str) -> None:
    if "$ref" in schema:
        also(schema, {"$ref": reference})
    else:
        schema["$ref"] = reference
