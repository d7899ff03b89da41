r"""Regular expressions that are matched against a text while it is being written.

``re`` can neither go on where it left off nor say "this may still become a match", and a pattern
such as ``(a+)+b`` keeps it busy for hours. So a pattern is turned into a nondeterministic automaton
that reads one character at a time and is in several states at once (Thompson, 1968): the time per
character is bounded by the number of states, whatever the pattern. A match counts as soon as it is
complete, so the shortest wins: ``\d+`` stops at the first digit.

Accepted: literals, classes, ``.``, groups, ``|``, ``* + ? {m,n}`` (lazy ones mean the same here),
``^`` for the beginning of the text (of a line with ``(?m)``), the flags ``i m s x a``. Refused with
a reason: ``$``, ``\b``, look-around, back-references, possessive and atomic groups, and anything
that matches the empty text.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

from sdk.errors import RequestError

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
# A match that began longer ago is given up: nothing is held back longer than this.
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
    """One pattern, compiled. Immutable; :meth:`start` gives the state of one text."""

    def __init__(self, pattern: str) -> None:
        """Raises RequestError, naming the pattern and what is wrong with it."""
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
        # States are numbered; 0 accepts. A state either reads a character that passes its test and
        # goes to its target, or (test None) is a fork to several states.
        self._tests: list[Callable[[str], bool] | None] = [None]
        self._targets: list[int] = [0]
        self._forks: list[tuple[int, ...]] = [()]
        self._only_at_start: set[int] = set()
        self._copies = 0
        self._first = self._sequence(tree, 0)
        if 0 in self._reachable(self._first, at_start=True):
            raise RequestError(f"stop_regex {pattern!r}: matches the empty text")

    def start(self) -> RegexRun:
        return RegexRun(self)

    def _refuse(self, what: str) -> RequestError:
        return RequestError(f"stop_regex {self.pattern!r}: {what} cannot be used")

    def _too_large(self) -> RequestError:
        return RequestError(
            f"stop_regex {self.pattern!r}: needs more than {MAX_STATES} states; use smaller repeats"
        )

    def _add(
        self, test: Callable[[str], bool] | None, target: int, forks: tuple[int, ...] = ()
    ) -> int:
        if len(self._tests) >= MAX_STATES:
            raise self._too_large()
        self._tests.append(test)
        self._targets.append(target)
        self._forks.append(forks)
        return len(self._tests) - 1

    def _sequence(self, items: Any, target: int) -> int:
        """The state from which ``items`` lead to ``target``: built from the end."""
        for operation, argument in reversed(list(items)):
            target = self._item(operation, argument, target)
        return target

    def _item(self, operation: Any, argument: Any, target: int) -> int:
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
        return self._add(self._test(operation, argument), target)

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
            self._copies += 1  # an empty group adds no state, but ((){1000}){1000} takes its time
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
        wanted = items[:1] != [(sre.NEGATE, None)]
        tests = [self._member(*item) for item in items if item[0] is not sre.NEGATE]
        if self._flags & re.IGNORECASE:
            return lambda c: any(test(c.lower()) or test(c.upper()) for test in tests) is wanted
        return lambda c: any(test(c) for test in tests) is wanted

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

    def _reachable(self, state: int, at_start: bool) -> list[int]:
        """The states that read or accept, reached from ``state`` without reading."""
        seen: set[int] = set()
        found: list[int] = []
        stack = [state]
        while stack:
            state = stack.pop()
            if state in seen or (state in self._only_at_start and not at_start):
                continue
            seen.add(state)
            if self._tests[state] is None and state:
                stack += self._forks[state]
            else:
                found.append(state)
        return found


class RegexRun:
    """A pattern and the text read so far (not the text itself: the states it led to)."""

    def __init__(self, regex: StopRegex) -> None:
        self._regex = regex
        self._live: dict[int, int] = {}  # state -> where its match began, the earliest
        self._position = 0
        self._line_start = True

    def read(self, character: str) -> int | None:
        """Read one character. The length of the match it completes, or None."""
        regex = self._regex
        multiline = bool(regex._flags & re.MULTILINE)
        at_start = self._position == 0 or (multiline and self._line_start)
        live = self._live
        for state in regex._reachable(regex._first, at_start):
            live.setdefault(state, self._position)
        following: dict[int, int] = {}
        self._position += 1
        oldest = self._position - MAX_HELD
        self._line_start = character == "\n"
        for state, began in live.items():
            test = regex._tests[state]
            if test is not None and began >= oldest and test(character):
                for reached in regex._reachable(
                    regex._targets[state], multiline and self._line_start
                ):
                    known = following.get(reached)
                    if known is None or began < known:
                        following[reached] = began
        began_at = following.pop(0, None)
        self._live = following
        return None if began_at is None else self._position - began_at

    @property
    def held(self) -> int:
        """How many of the last characters may still become part of a match."""
        return self._position - min(self._live.values(), default=self._position)
