"""Writes the rules of a GBNF grammar in llguidance's dialect of Lark.

llama.cpp follows a grammar character by character. llguidance cuts the text into *lexemes* first,
each as long as possible, and a grammar of single characters is slow there. So parts without
recursion become lexemes, but only where the cut is certain: the text of one could not go on with a
character that may follow it, and where several may begin, their first characters differ. Other
parts are divided into smaller ones, in the end into characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

from sdk.api.errors import RequestError
from sdk.structured.gbnf import (
    ANY,
    Characters,
    Choice,
    Node,
    Ranges,
    Reference,
    Repeat,
    Sequence,
    Text,
    Token,
    overlap,
    rules_of,
    united,
)
from sdk.structured.limits import check_rules

_IN_CLASS = re.compile(r"[\\\]\[^&~/?*+{}|.()$#-]")
#: Rounds of dividing what is cut differently; each one divides all such parts.
_MOST_ROUNDS = 200


def lark_of(text: str) -> str:
    """A GBNF grammar in Lark's notation.

    :raises RequestError: it cannot be read, or its rules are nested too deep.
    """
    try:
        rules = _reachable(rules_of(text))
        check_rules(
            {name: _depth(node) for name, node in rules.items()},
            {name: [one.name for one in _references(node)] for name, node in rules.items()},
        )
        return _Writer(rules).grammar()
    except RecursionError as error:
        raise RequestError("grammar: its brackets and repetitions are nested too deep") from error


class _Facts(NamedTuple):
    """What is known of the texts of a part. ``more``: characters with which a whole text of it may
    go on. ``every``: all characters in it. Sets may have more characters than needed.
    """

    nullable: bool = False
    first: Ranges = ()
    more: Ranges = ()
    every: Ranges = ()


_EMPTY = _Facts(nullable=True)


def _children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Sequence):
        return node.parts
    if isinstance(node, Choice):
        return node.options
    return (node.part,) if isinstance(node, Repeat) else ()


def _walk(node: Node) -> Iterator[Node]:
    yield node
    for child in _children(node):
        yield from _walk(child)


def _references(node: Node) -> Iterator[Reference]:
    return (one for one in _walk(node) if isinstance(one, Reference))


def _depth(node: Node) -> int:
    return 1 + max(map(_depth, _children(node)), default=0)


def _reachable(rules: Mapping[str, Node]) -> dict[str, Node]:
    """The rules that the first one needs. :raises RequestError: one is missing."""
    found: dict[str, Node] = {}
    pending = ["root"]
    while pending:
        name = pending.pop()
        if name in found:
            continue
        if name not in rules:
            raise RequestError(f"grammar: it cannot be read as GBNF: there is no rule {name!r}")
        found[name] = rules[name]
        pending += [one.name for one in _references(rules[name])]
    return found


def _joined(one: _Facts, other: _Facts) -> _Facts:
    """Of one part and then another."""
    first = united((one.first, other.first)) if one.nullable else one.first
    every = united((one.every, other.every))
    if overlap(one.more, other.first):  # where one ends is not certain
        more = every
    else:
        more = united((other.more, one.more, other.first)) if other.nullable else other.more
    return _Facts(one.nullable and other.nullable, first, more, every)


def _chosen(options: list[_Facts]) -> _Facts:
    """Of one of several parts."""
    first = united(one.first for one in options)
    every = united(one.every for one in options)
    nullable = any(one.nullable for one in options)
    if _conflict(options):
        more = every
    else:
        more = united([*(one.more for one in options), *([first] if nullable else [])])
    return _Facts(nullable, first, more, every)


def _conflict(options: list[_Facts]) -> bool:
    """Whether the first character does not tell the options apart."""
    if sum(one.nullable for one in options) > 1:
        return True
    ranges = sorted(one for facts in options for one in facts.first)
    return any(following[0] <= before[1] for before, following in pairwise(ranges))


def _of_texts(texts: list[str]) -> _Facts:
    """Of one of several texts: exactly."""
    ordered = sorted(set(texts))
    more, open_texts = set(), list[str]()
    for text in ordered:  # those that it begins with come before it
        while open_texts and not text.startswith(open_texts[-1]):
            open_texts.pop()
        more |= {text[len(one)] for one in open_texts[-1:]}
        open_texts.append(text)
    return _Facts(
        "" in ordered,
        _set(text[0] for text in ordered if text),
        _set(more),
        _set(character for text in ordered for character in text),
    )


def _set(characters: Iterable[str]) -> Ranges:
    return united(((ord(one), ord(one)),) for one in set(characters))


def _repeated(one: _Facts, least: int, most: int | None) -> _Facts:
    if most == 0:
        return _EMPTY
    more = one.more
    if most != 1 and (one.nullable or overlap(one.more, one.first)):
        more = one.every
    elif least != most:
        more = united((one.more, one.first))
    return _Facts(one.nullable or least == 0, one.first, more, one.every)


class _Writer:
    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._facts: dict[str, _Facts] = dict.fromkeys(rules, _Facts())  # by the name of a rule
        self._kept = rules  # parts are known by their ids
        self._of_node: dict[int, _Facts] = {}  # of parts without recursion
        self._flat_nodes: dict[int, bool] = {}
        self._flat: set[str] = set()  # rules without recursion and control tokens
        self._complete = False  # whether the facts of all rules are known
        self._letters: dict[str, Text] = {}
        references = {name: {one.name for one in _references(node)} for name, node in rules.items()}
        used_by: dict[str, list[str]] = {name: [] for name in rules}
        for name, used in references.items():
            for one in used:
                used_by[one].append(name)
        self._find_flat(rules, references, used_by)
        self._rules = {name: self._grouped(node) for name, node in rules.items()}
        self._find_first(used_by)
        self._complete = True
        #: Parts without recursion that are divided, and characters that may follow a rule.
        self._divided: set[int] = set()
        self._follow: dict[str, Ranges] = {}
        self._lexemes: list[tuple[Node, Ranges]] = []
        self._ambiguous = False
        self._only_characters = False
        self._names: dict[tuple[str, str], str] = {}
        self._lexeme_names: dict[Node, str] = {}
        self._lines: list[str] = []
        self._pending: list[tuple[str, str]] = []

    def _find_flat(
        self,
        rules: Mapping[str, Node],
        references: Mapping[str, set[str]],
        used_by: Mapping[str, list[str]],
    ) -> None:
        tokens = {name for name, node in rules.items() if any(map(_is_token, _walk(node)))}
        left = {name: len(used) for name, used in references.items()}
        pending = [name for name, count in left.items() if not count and name not in tokens]
        while pending:
            name = pending.pop()
            self._flat.add(name)
            self._facts[name] = self._read(rules[name])
            for one in used_by[name]:
                left[one] -= 1
                if not left[one] and one not in tokens:
                    pending.append(one)

    def _find_first(self, used_by: Mapping[str, list[str]]) -> None:
        """The first characters of rules with recursion, which depend on one another."""
        pending = dict.fromkeys(name for name in self._rules if name not in self._flat)
        while pending:
            name = next(iter(pending))
            del pending[name]
            facts = self._read(self._rules[name])
            if facts[:2] != self._facts[name][:2]:
                self._facts[name] = facts
                pending.update(dict.fromkeys(used_by[name]))

    def _read(self, node: Node) -> _Facts:
        if isinstance(node, Reference):
            return self._facts[node.name]
        if id(node) in self._of_node:
            return self._of_node[id(node)]
        facts = _EMPTY
        if isinstance(node, Text):
            facts = _of_texts([node.text])
        elif isinstance(node, Characters):
            facts = _Facts(False, node.ranges, (), node.ranges)
        elif isinstance(node, Token):
            facts = _Facts()
        elif isinstance(node, Sequence):
            for part in node.parts:
                facts = _joined(facts, self._read(part))
        elif isinstance(node, Choice):
            texts = [one.text for one in node.options if isinstance(one, Text)]
            options = [self._read(one) for one in node.options if not isinstance(one, Text)]
            facts = _chosen([*options, *([_of_texts(texts)] if texts else [])])
        elif isinstance(node, Repeat):
            facts = _repeated(self._read(node.part), node.least, node.most)
        if self._complete or (_children(node) and self._is_flat(node)):
            self._of_node[id(node)] = facts
        return facts

    def _is_flat(self, node: Node) -> bool:
        if isinstance(node, Reference):
            return node.name in self._flat
        if not (children := _children(node)):
            return not isinstance(node, Token)
        if id(node) not in self._flat_nodes:
            self._flat_nodes[id(node)] = all(map(self._is_flat, children))
        return self._flat_nodes[id(node)]

    def _grouped(self, node: Node) -> Node:
        """With neighbours without recursion in one part, which may become a lexeme."""
        if self._is_flat(node) or isinstance(node, Reference | Token):
            return node
        if isinstance(node, Repeat):
            return node._replace(part=self._grouped(node.part))
        if isinstance(node, Choice):
            flat = [one for one in node.options if self._is_flat(one)]
            rest = [self._grouped(one) for one in node.options if not self._is_flat(one)]
            return Choice((*([Choice(tuple(flat))] if len(flat) > 1 else flat), *rest))
        assert isinstance(node, Sequence)
        parts: list[Node] = []
        run: list[Node] = []
        for part in (*node.parts, None):
            if part is not None and self._is_flat(part):
                run.append(part)
                continue
            parts += [Sequence(tuple(run))] if len(run) > 1 else run
            run = []
            if part is not None:
                parts.append(self._grouped(part))
        return Sequence(tuple(parts))

    # Where the text is cut.

    def grammar(self) -> str:
        """The whole grammar."""
        for _ in range(_MOST_ROUNDS):
            self._find_lexemes()
            divide = self._uncertain()
            if not divide:
                break
            self._divided |= divide
        else:
            self._only_characters = True
        self._lines.append(f"start: {self._rule('root')}")
        while self._pending:
            kind, name = self._pending.pop()
            write = self._written if kind == "r" else self._terminal
            self._lines.append(f"{self._names[kind, name]}: {write(self._rules[name])}")
        return "\n".join(self._lines)

    def _is_lexeme(self, node: Node) -> bool:
        if _is_single(node):
            return True
        divided = self._only_characters or id(node) in self._divided
        return not divided and self._is_flat(node)

    def _find_lexemes(self) -> None:
        """The parts that would be lexemes, and what may follow each."""
        self._follow = {"root": ()}
        pending = ["root"]
        while pending:
            name = pending.pop()
            self._visit(self._rules[name], self._follow[name], pending)
        self._lexemes, self._ambiguous = [], False
        for name in list(self._follow):
            self._visit(self._rules[name], self._follow[name], pending)

    def _visit(self, node: Node, follow: Ranges, pending: list[str]) -> None:
        """``pending`` gets the names of rules that more may follow than was known."""
        if self._is_lexeme(node):
            self._lexemes.append((node, follow))
        elif isinstance(node, Reference):
            known = self._follow.get(node.name)
            found = united((known or (), follow))
            if found != known:
                self._follow[node.name] = found
                pending.append(node.name)
        elif isinstance(node, Text):
            self._lexemes += [(self._letters.setdefault(x, Text(x)), ()) for x in node.text]
        elif isinstance(node, Sequence):
            for part in reversed(node.parts):
                self._visit(part, follow, pending)
                facts = self._read(part)
                follow = united((facts.first, follow)) if facts.nullable else facts.first
        elif isinstance(node, Choice):
            if not pending:  # so in the last visits, when all that may follow is known
                options = [self._read(one) for one in node.options]
                after = [_Facts(first=follow)] if any(one.nullable for one in options) else []
                self._ambiguous |= _conflict([*options, *after])
            for one in node.options:
                self._visit(one, follow, pending)
        elif isinstance(node, Repeat):
            facts = self._read(node.part)
            if node.least != node.most:
                self._ambiguous |= facts.nullable or overlap(facts.first, follow)
            again = node.most is None or node.most > 1
            self._visit(node.part, united((follow, facts.first)) if again else follow, pending)

    def _uncertain(self) -> set[int]:
        """Lexemes of which it is not certain where they begin or end."""
        alike = self._alike() if self._ambiguous else frozenset[Node]()
        return {
            id(node)
            for node, follow in self._lexemes
            if not _is_single(node) and (overlap(self._read(node).more, follow) or node in alike)
        }

    def _alike(self) -> set[Node]:
        """Lexemes whose first character may be that of another one."""
        distinct = list({node for node, _ in self._lexemes})
        first = sorted(
            (*one, i) for i, node in enumerate(distinct) for one in self._read(node).first
        )
        found: set[Node] = set()
        last, holder = -1, -1
        for low, high, index in first:
            if low <= last and index != holder:
                found |= {distinct[index], distinct[holder]}
            if high > last:
                last, holder = high, index
        return found

    # Lark's notation.

    def _rule(self, name: str) -> str:
        return self._named("r", name)

    def _named(self, kind: str, name: str) -> str:
        """The name of a rule (``r``) or of a terminal (``T``), which will be written."""
        if (kind, name) not in self._names:
            self._names[kind, name] = f"{kind}{len(self._names)}"
            self._pending.append((kind, name))
        return self._names[kind, name]

    def _written(self, node: Node) -> str:
        """A part of a rule."""
        if self._is_lexeme(node):
            return self._lexeme(node)
        if isinstance(node, Reference):
            return self._rule(node.name)
        if isinstance(node, Text):
            return " ".join(map(_quoted, node.text))
        if isinstance(node, Token):
            return f"<[^{node.name}]>" if node.negated else _token(node.name)
        return _composed(node, self._written)

    def _lexeme(self, node: Node) -> str:
        if isinstance(node, Text):
            return _quoted(node.text)
        if isinstance(node, Characters):
            return _class(node.ranges)
        if isinstance(node, Reference):
            return self._named("T", node.name)
        if node not in self._lexeme_names:
            name = self._lexeme_names[node] = f"L{len(self._lexeme_names)}"
            self._lines.append(f"{name}: {self._terminal(node)}")
        return self._lexeme_names[node]

    def _terminal(self, node: Node) -> str:
        """A part of a terminal."""
        if isinstance(node, Text | Characters | Reference):
            return self._lexeme(node)
        return _composed(node, self._terminal)


def _composed(node: Node, write: Callable[[Node], str]) -> str:
    if isinstance(node, Sequence):
        return " ".join(map(write, node.parts)) or '""'
    if isinstance(node, Choice):
        return f"({' | '.join(map(write, node.options))})"
    assert isinstance(node, Repeat)
    times = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.least, node.most))
    if times is None:
        times = f"{{{node.least},{'' if node.most is None else node.most}}}"
    return '""' if node.most == 0 else f"({write(node.part)}){times}"


def _is_single(node: Node) -> bool:
    return isinstance(node, Characters) or (isinstance(node, Text) and len(node.text) < 2)


def _is_token(node: Node) -> bool:
    return isinstance(node, Token)


def _token(name: str) -> str:
    return name if name.startswith("<") else f"<[{name}]>"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _class(ranges: Ranges) -> str:
    """A class of characters as a regular expression."""
    if ranges == ANY:
        return "/(?s:.)/"
    parts = [_written_range(low, high) for low, high in ranges]
    return f"/[{''.join(parts)}]/"


def _written_range(low: int, high: int) -> str:
    ends = [_in_class(chr(code)) for code in dict.fromkeys((low, high))]
    return "-".join(ends)


def _in_class(character: str) -> str:
    if character < " " or character == "\x7f":
        return f"\\x{ord(character):02x}"
    return _IN_CLASS.sub(r"\\\g<0>", character)
