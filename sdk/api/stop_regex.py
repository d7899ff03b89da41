r"""Regular expressions that are matched against a text while it is being generated.

``re`` can neither continue where it stopped nor report that a match is still possible, and a
pattern such as ``(a+)+b`` keeps it busy for hours. So a pattern becomes a nondeterministic
automaton that reads one character at a time and is in several states at once (Thompson, 1968).
Transitions without a character are resolved when the pattern is compiled, and sets of states are
bits of integers. A character costs at most one operation per place of the pattern that reads a
character: 0.2 ms for the allowed 256. The result for a set and a character is cached, so it usually
costs a look-up. A match counts as soon as it is complete, so the shortest wins: ``\d+`` stops at
the first digit.

Supported: literals, classes, ``.``, groups, ``|``, ``* + ? {m,n}`` (lazy ones mean the same here),
``^`` for the beginning of the text (of a line with ``(?m)``), the flags ``i m s x a``. Rejected
with a reason: ``$``, ``\b``, look-around, back-references, possessive and atomic groups, and
anything that matches the empty text.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections.abc import Callable
from typing import Any, NamedTuple

from sdk.api.errors import RequestError

if sys.version_info >= (3, 11):
    from re import (
        _constants as sre,  # type: ignore[attr-defined]
        _parser as sre_parser,
    )
else:
    import sre_constants as sre
    import sre_parse as sre_parser

MAX_PATTERN_LEN = 512
MAX_STATES = 1024
#: Places that read a character, with repeats written out: ``[ab]{20}`` has 20.
MAX_PLACES = 256
# Cached sets of places and their transitions, some 200 bytes each: 32 MiB for 64 requests. A full
# cache is cleared.
_MAX_CACHED = 2048
# A match that began longer ago is dropped: no text is held back longer than this.
MAX_HELD = 1024

_CATEGORIES: dict[Any, Callable[[str], bool]] = {
    sre.CATEGORY_DIGIT: str.isdecimal,
    sre.CATEGORY_NOT_DIGIT: lambda c: not c.isdecimal(),
    sre.CATEGORY_SPACE: str.isspace,
    sre.CATEGORY_NOT_SPACE: lambda c: not c.isspace(),
    sre.CATEGORY_WORD: lambda c: c.isalnum() or c == "_",
    sre.CATEGORY_NOT_WORD: lambda c: not (c.isalnum() or c == "_"),
}
_REFUSED = {
    "AT": "anchors other than ^ (the end of the text is not known while it is written)",
    "ASSERT": "look-ahead and look-behind",
    "ASSERT_NOT": "look-ahead and look-behind",
    "GROUPREF": "back-references",
    "GROUPREF_EXISTS": "conditional groups",
    "ATOMIC_GROUP": "atomic groups",
    "POSSESSIVE_REPEAT": "possessive repeats",
}


class StopRegex:
    """One compiled pattern; :meth:`start` returns the state of one text.

    Several texts may share it, but not several threads, because it caches transitions.
    """

    def __init__(self, pattern: str) -> None:
        """:raises RequestError: the pattern is invalid or not supported; says why."""
        self.pattern = pattern
        if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_PATTERN_LEN:
            size = len(pattern) if isinstance(pattern, str) else type(pattern).__name__
            raise RequestError(
                f"stop_regex: expected a pattern of 1 to {MAX_PATTERN_LEN} characters, found {size}"
            )
        try:
            tree = sre_parser.parse(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise RequestError(
                f"stop_regex {pattern!r}: not a regular expression: {error}"
            ) from None
        self._flags = tree.state.flags
        self.multiline = bool(tree.state.flags & re.MULTILINE)
        # States are numbered; 0 accepts. A state either reads a character that passes its test and
        # goes to its target, or (test None) forks to several states.
        self._tests: list[int | None] = [None]  # numbers of distinct tests
        self._targets: list[int] = [0]
        self._forks: list[tuple[int, ...]] = [()]
        self._only_at_start: set[int] = set()
        self._copies = 0
        self._items: list[Any] = []  # of the pattern, by test; kept alive so that ids stay unique
        self._passes: list[Callable[[str], bool]] = []
        self._known: dict[int, int] = {}  # id of an item of the pattern -> its test
        first = self._sequence(tree, 0)
        self._compile(first)

    def start(self) -> RegexRun:
        return RegexRun(self)

    def _refuse(self, what: str) -> RequestError:
        return RequestError(f"stop_regex {self.pattern!r}: {what} are not supported")

    def _too_large(self) -> RequestError:
        return RequestError(
            f"stop_regex {self.pattern!r}: needs more than {MAX_STATES} states; use smaller repeats"
        )

    def _add(self, test: int | None, target: int, forks: tuple[int, ...] = ()) -> int:
        if len(self._tests) >= MAX_STATES:
            raise self._too_large()
        self._tests.append(test)
        self._targets.append(target)
        self._forks.append(forks)
        return len(self._tests) - 1

    def _sequence(self, items: Any, target: int) -> int:
        """The state from which ``items`` lead to ``target``; built from the end."""
        for item in reversed(list(items)):
            target = self._item(item, target)
        return target

    def _item(self, item: Any, target: int) -> int:
        operation, argument = item
        if operation is sre.SUBPATTERN:
            _, added, removed, items = argument
            if added or removed:
                raise self._refuse("flags inside a group")
            return self._sequence(items, target)
        if operation is sre.BRANCH:
            return self._add(None, 0, tuple(self._sequence(items, target) for items in argument[1]))
        if operation in (sre.MAX_REPEAT, sre.MIN_REPEAT):
            least, most, items = argument
            return self._repeat(least, most, items, target)
        if operation is sre.AT and argument is sre.AT_BEGINNING:
            state = self._add(None, 0, (target,))
            self._only_at_start.add(state)
            return state
        number = self._known.get(id(item))
        if number is None:  # a repeat passes the same item again
            number = self._known[id(item)] = len(self._passes)
            self._items.append(item)
            self._passes.append(self._test(operation, argument))
        return self._add(number, target)

    def _repeat(self, least: int, most: Any, items: Any, target: int) -> int:
        if most is sre.MAXREPEAT:
            loop = self._add(None, 0)
            self._forks[loop] = (self._sequence(items, loop), target)
            state = loop
        else:
            state = target
            for _ in range(most - least):
                state = self._add(None, 0, (self._sequence(items, state), target))
        for _ in range(least):
            self._copies += 1  # an empty group adds no state, but ((){1000}){1000} takes long
            if self._copies > MAX_STATES:
                raise self._too_large()
            state = self._sequence(items, state)
        return state

    def _test(self, operation: Any, argument: Any) -> Callable[[str], bool]:
        """Whether a character passes."""
        if operation is sre.ANY:
            return (lambda c: True) if self._flags & re.DOTALL else (lambda c: c != "\n")
        if operation is sre.IN:
            items = list(argument)
        elif operation in (sre.LITERAL, sre.NOT_LITERAL):
            items = [(sre.LITERAL, argument)]
            if operation is sre.NOT_LITERAL:
                items.insert(0, (sre.NEGATE, None))
        else:
            raise self._refuse(_REFUSED.get(str(operation), str(operation)))
        positive = items[:1] != [(sre.NEGATE, None)]
        tests = [self._member(*item) for item in items if item[0] is not sre.NEGATE]
        if self._flags & re.IGNORECASE:
            return lambda c: any(test(c.lower()) or test(c.upper()) for test in tests) is positive
        return lambda c: any(test(c) for test in tests) is positive

    def _member(self, operation: Any, argument: Any) -> Callable[[str], bool]:
        if operation is sre.LITERAL:
            return chr(argument).__eq__
        if operation is sre.RANGE:
            low, high = chr(argument[0]), chr(argument[1])
            return lambda c: low <= c <= high
        if operation is sre.CATEGORY and argument in _CATEGORIES:
            test = _CATEGORIES[argument]
            if self._flags & re.ASCII:
                positive = "_NOT_" not in str(argument)
                return lambda c: test(c) if c.isascii() else not positive
            return test
        raise self._refuse(str(argument))

    def _compile(self, first: int) -> None:
        """Turn states into places, the states that read or accept, as bits; bit 0 accepts."""
        places = [state for state, test in enumerate(self._tests) if test is not None or not state]
        if len(places) > MAX_PLACES + 1:
            raise RequestError(
                f"stop_regex {self.pattern!r}: expected at most {MAX_PLACES} places that read a "
                f"character, found {len(places) - 1} with repeats written out; use smaller repeats"
            )
        inside = self._reached(places, at_start=False)
        begin = self._reached(places, at_start=True)
        if begin[first] & 1:
            raise RequestError(
                f"stop_regex {self.pattern!r}: it matches the empty text; use a pattern that "
                "needs at least one character"
            )
        line = begin if self.multiline else inside
        #: The places of a new match: inside a text, and where ``^`` matches.
        self.entries = inside[first], begin[first]
        #: The places that each place leads to: usually, and where ``^`` matches after it.
        self.following = tuple(
            [reached[self._targets[state]] for state in places] for reached in (inside, line)
        )
        self._readers = [0] * len(self._passes)  # by test, the places that have it
        for bit, state in enumerate(places):
            test = self._tests[state]
            if test is not None:
                self._readers[test] |= 1 << bit
        self._reading: dict[str, int] = {}
        self._cached = 0
        self.root = Node(())
        self._nodes: dict[tuple[int, ...], Node] = {(): self.root}

    def _reached(self, places: list[int], at_start: bool) -> list[int]:
        """For each state the places, as bits, that it reaches without reading."""
        reached = [0] * len(self._tests)
        for bit, state in enumerate(places):
            reached[state] = 1 << bit
        changed = True
        while changed:  # as often as loops are nested, and once more
            changed = False
            for state, forks in enumerate(self._forks):  # a state's targets come before it
                if state in self._only_at_start and not at_start:
                    continue
                bits = reached[state]
                for target in forks:
                    bits |= reached[target]
                changed |= bits != reached[state]
                reached[state] = bits
        return reached

    def reading(self, character: str) -> int:
        """The places that accept a character, as bits."""
        bits = self._reading.get(character)
        if bits is None:
            bits = 0
            for passes, readers in zip(self._passes, self._readers, strict=True):
                if passes(character):
                    bits |= readers
            if len(self._reading) >= _MAX_CACHED:
                self._reading.clear()
            self._reading[character] = bits
        return bits

    def step(self, node: Node, dropped: int, at_start: bool, character: str) -> Step:
        """The step from ``node``, without its ``dropped`` first groups, which began too long ago.

        A new match may begin at this character; its group comes last.
        """
        entry = self.entries[at_start]
        for group in node.groups:
            entry &= ~group
        sources = [*enumerate(node.groups), (len(node.groups), entry)][dropped:]
        passing = self.reading(character)
        following = self.following[character == "\n"]
        groups: list[int] = []
        origins: list[int] = []
        accepted: int | None = None
        seen = 0
        for index, group in sources:
            reached, bits = 0, group & passing
            while bits:
                lowest = bits & -bits
                reached |= following[lowest.bit_length() - 1]
                bits ^= lowest
            reached &= ~seen
            seen |= reached
            if reached & 1:
                accepted, reached = index, reached ^ 1
            if reached:
                groups.append(reached)
                origins.append(index)
        return Step(self._found(tuple(groups)), tuple(origins), accepted)

    def remember(self, node: Node, key: tuple[str, bool], step: Step) -> None:
        """Cache a step for the next time at ``node``."""
        if self._fits_cache(1 + len(step.origins)):
            node.steps[key] = step

    def _found(self, groups: tuple[int, ...]) -> Node:
        node = self._nodes.get(groups)
        if node is None:
            node = Node(groups)
            if self._fits_cache(1 + len(groups)):
                self._nodes[groups] = node
        return node

    def _fits_cache(self, count: int) -> bool:
        self._cached += count
        if self._cached <= _MAX_CACHED:
            return True
        self._cached = 0
        self._nodes = {(): self.root}
        self.root.steps.clear()
        return False


class Node:
    """The possible places of a text, grouped by where their matches began, earliest first."""

    __slots__ = ("groups", "steps")

    def __init__(self, groups: tuple[int, ...]) -> None:
        self.groups = groups
        self.steps: dict[tuple[str, bool], Step] = {}


class Step(NamedTuple):
    """The result of a character at a node."""

    node: Node
    #: For each group of ``node``, its index before the step, or their number then if it is new.
    origins: tuple[int, ...]
    #: The group whose match is complete.
    accepted: int | None


class RegexRun:
    """The state of a pattern after the text read so far; does not store the text."""

    def __init__(self, regex: StopRegex) -> None:
        self._regex = regex
        self._node = regex.root
        self._begins: list[int] = []  # of the node's groups, ascending
        self._position = 0
        self._at_start = True

    def read(self, character: str) -> int | None:
        """Read one character; the length of the match that it completes, or None."""
        regex, node, begins, position = self._regex, self._node, self._begins, self._position
        at_start = self._at_start
        self._position = position + 1
        self._at_start = regex.multiline and character == "\n"
        oldest = position + 1 - MAX_HELD
        key = character, at_start
        step = node.steps.get(key)
        if begins and begins[0] < oldest:
            step = regex.step(node, bisect_left(begins, oldest), at_start, character)
        elif step is None:
            step = regex.step(node, 0, at_start, character)
            regex.remember(node, key, step)
        self._node = step.node
        if not step.origins and step.accepted is None:
            if begins:
                self._begins = []
            return None
        self._begins = [
            begins[index] if index < len(begins) else position for index in step.origins
        ]
        if step.accepted is None:
            return None
        began = begins[step.accepted] if step.accepted < len(begins) else position
        return self._position - began

    @property
    def held(self) -> int:
        """The number of last characters that may still become part of a match."""
        return self._position - self._begins[0] if self._begins else 0
