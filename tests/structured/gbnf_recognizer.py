"""What a GBNF grammar accepts, character by character, as llama.cpp follows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from sdk.structured.gbnf import (
    Characters,
    Choice,
    Node,
    Reference,
    Repeat,
    Sequence,
    Text,
    rules_of,
)


def recognizes(grammar: str, text: str) -> bool:
    """Whether a text follows a grammar: where matches of each part end, until nothing is new."""
    rules = rules_of(grammar)
    nodes = [node for rule in rules.values() for node in _inside(rule)]
    ends: dict[tuple[int, int], set[int]] = {
        (id(node), at): set() for node in nodes for at in range(len(text) + 1)
    }

    def after(node: Node, places: Iterable[int]) -> set[int]:
        return {end for at in places for end in ends[id(node), at]}

    def matches(node: Node, at: int) -> set[int]:
        if isinstance(node, Text):
            return {at + len(node.text)} if text.startswith(node.text, at) else set()
        if isinstance(node, Characters):
            found = at < len(text) and any(a <= ord(text[at]) <= b for a, b in node.ranges)
            return {at + 1} if found else set()
        if isinstance(node, Reference):
            return after(rules[node.name], (at,))
        if isinstance(node, Choice):
            return {end for one in node.options for end in ends[id(one), at]}
        if isinstance(node, Sequence):
            places = {at}
            for part in node.parts:
                places = after(part, places)
            return places
        assert isinstance(node, Repeat)
        places = {at}
        found_ends = {at} if node.least == 0 else set()
        most = len(text) + 1 + node.least if node.most is None else node.most
        for count in range(1, most + 1):
            places = after(node.part, places)
            if count >= node.least:
                found_ends |= places
        return found_ends

    changed = True
    while changed:
        changed = False
        for node in reversed(nodes):
            for at in range(len(text) + 1):
                found = matches(node, at)
                if not found <= ends[id(node), at]:
                    ends[id(node), at] |= found
                    changed = True
    return len(text) in ends[id(rules["root"]), 0]


def _inside(node: Node) -> Iterator[Node]:
    yield node
    if isinstance(node, Sequence):
        inner = node.parts
    elif isinstance(node, Choice):
        inner = node.options
    else:
        inner = (node.part,) if isinstance(node, Repeat) else ()
    for one in inner:
        yield from _inside(one)
