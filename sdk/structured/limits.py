"""Sizes that llguidance does not check: it follows references on the stack of the calling thread.

With 1 MiB of stack it ended the process at 110 objects inside one another through references (220
schemas), at 116 rules of a grammar with three brackets each, and at 3,281 properties of an object
(llguidance 1.9.1).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sdk.api.errors import RequestError
from sdk.kernels.system import SYSTEM
from sdk.structured.document import Schema, children_of, schemas_in
from sdk.structured.numbers import check_multiples

#: Bytes of stack for one schema inside another or for one rule or bracket, where up to 9,500 and
#: 3,300 were measured; and for one property, where 320 were.
_LEVEL_BYTES, _NAME_BYTES = 16_384, 1024
#: Repetitions of a pattern: 5,000 optional characters took 100 MB, 20,000 took 1.6 GB and 10 s.
_MOST_REPEATS = 3000
_REPEAT = re.compile(r"\\.|[?*+{]", re.DOTALL)
_APPLICATORS = ("allOf", "anyOf", "oneOf")
#: Nodes without which others may not lead to one another: how many are looked for, and among how
#: many others at least.
_MOST_HUBS, _FEW = 3, 16


def check_size(root: Schema) -> None:
    """:raises RequestError: the library would need too much stack, or numbers of too many bits.

    ``root``: a schema whose references are ``#`` or ``#/$defs/<name>``.
    """
    parts = {"#": root}
    parts |= {f"#/$defs/{name}": one for name, one in root.get("$defs", {}).items()}
    weights = {name: depth(one) for name, one in parts.items()}
    edges = {name: list(_references(one)) for name, one in parts.items()}
    most = SYSTEM.stack_bytes() // _LEVEL_BYTES
    if (found := longest_path(weights, edges)) > most:
        raise RequestError(
            f"json: schemas that refer to one another are nested up to {found} deep: expected at "
            f"most {most} for the stack of this thread; use fewer definitions"
        )
    names = _Names(parts)
    most = SYSTEM.stack_bytes() // _NAME_BYTES
    for one in parts.values():
        for schema in schemas_in(one):
            if (count := names.of(schema)) > most:
                raise RequestError(f"json: an object has {count} properties: expected up to {most}")
            for pattern in (schema.get("pattern"), *(schema.get("patternProperties") or ())):
                if isinstance(pattern, str):
                    check_pattern("json", pattern)
    check_multiples(_merged(parts))


def check_pattern(name: str, pattern: str) -> None:
    """:raises RequestError: a regular expression repeats too many of its parts."""
    count = sum(1 for part in _REPEAT.findall(pattern) if part[0] != "\\")
    if count > _MOST_REPEATS:
        raise RequestError(
            f"{name}: a pattern has {count} repetitions: expected at most {_MOST_REPEATS}"
        )


def check_rules(weights: Mapping[str, int], edges: Mapping[str, Sequence[str]]) -> None:
    """The same for the rules of a grammar; ``weights``: 1 and the brackets inside one another."""
    most = SYSTEM.stack_bytes() // _LEVEL_BYTES
    if (found := longest_path(weights, edges)) > most:
        raise RequestError(
            f"grammar: its rules and brackets are nested up to {found} deep: expected at most "
            f"{most} for the stack of this thread; use fewer rules"
        )


def longest_path(
    weights: Mapping[str, int], edges: Mapping[str, Sequence[str]], hubs: int = _MOST_HUBS
) -> int:
    """The largest sum of weights that a walk which enters every node once can have, or more: nodes
    that lead to one another count together, unless a few of them, up to ``hubs``, are the reason.
    """
    longest: dict[str, int] = {}  # of nodes whose component is complete
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    for start in weights:
        if start in index:
            continue
        work: list[tuple[str, Iterator[str]]] = []

        def enter(node: str, work: list[tuple[str, Iterator[str]]] = work) -> None:
            index[node] = low[node] = len(index)
            stack.append(node)
            work.append((node, iter([one for one in edges[node] if one in weights])))

        enter(start)
        while work:
            node, rest = work[-1]
            following = next(rest, None)
            if following is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    component = stack[stack.index(node) :]
                    del stack[-len(component) :]
                    after = max(
                        (longest.get(to, 0) for one in component for to in edges[one]), default=0
                    )
                    size = _within(component, weights, edges, hubs) + after
                    longest.update(dict.fromkeys(component, size))
            elif following not in index:
                enter(following)
            elif following not in longest:
                low[node] = min(low[node], index[following])
    return max(longest.values(), default=0)


def _within(
    component: Sequence[str],
    weights: Mapping[str, int],
    edges: Mapping[str, Sequence[str]],
    hubs: int,
) -> int:
    """The same for nodes that all lead to one another."""
    every = sum(weights[node] for node in component)
    if len(component) <= _FEW or not hubs:
        return every
    inside = dict.fromkeys(component, 0)
    for node in component:
        for to in edges[node]:
            if to in inside:
                inside[to] += 1
    hub = max(component, key=lambda node: inside[node])
    rest = {node: weights[node] for node in component if node != hub}
    # A walk enters the hub once: there is one part before it and one after it.
    return min(every, weights[hub] + 2 * longest_path(rest, edges, hubs - 1))


def depth(schema: Any) -> int:
    """How many schemas are inside one another."""
    if not isinstance(schema, dict):
        return 1
    return 1 + max(map(depth, children_of(schema)), default=0)


def _references(schema: Any) -> Iterator[str]:
    for one in schemas_in(schema):
        if isinstance(one.get("$ref"), str):
            yield one["$ref"]


class _Names:
    """Counts the properties of objects together with those of the schemas they are merged with."""

    def __init__(self, parts: Mapping[str, Schema]) -> None:
        self._parts = parts
        self._known: dict[str, int] = {}

    def of(self, schema: Any) -> int:
        if not isinstance(schema, dict):
            return 0
        own = {*_keys(schema.get("properties")), *_keys(schema.get("required"))}
        count = len(own)
        for name in _APPLICATORS:
            options = [self.of(one) for one in schema.get(name, ())]
            count += sum(options) if name == "allOf" else max(options, default=0)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            if reference not in self._known:
                self._known[reference] = 0  # a schema that contains itself adds nothing
                self._known[reference] = self.of(self._parts.get(reference))
            count += self._known[reference]
        return count


def _keys(names: Any) -> list[str]:
    return [name for name in names if isinstance(name, str)] if names else []


def _merged(parts: Mapping[str, Schema]) -> list[Schema]:
    """The schemas that the library may merge with others."""
    pending: list[Any] = []
    for one in parts.values():
        for schema in schemas_in(one):
            several = any(name in schema for name in (*_APPLICATORS, "patternProperties"))
            if several or ("$ref" in schema and len(schema) > 1):
                pending.append(schema)
    found: dict[int, Schema] = {}
    while pending:
        for schema in schemas_in(pending.pop()):
            if id(schema) not in found:
                found[id(schema)] = schema
                pending.append(parts.get(str(schema.get("$ref"))))
    return list(found.values())
