"""Text that arrives in pieces, read as if all of it were there.

A reader is a generator. It yields when the next character has not arrived, and goes on when more
text or the end is there. Readers see the text only through the methods of :class:`TextStream`, and
no method's result depends on where the pieces begin and end. So the result of a reader does not
either.

Characters are consumed once, and what is held back (the possible beginning of a mark) is at most as
long as the longest mark. So the time is linear in the length of the text, even for pieces of one
character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import cache
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Reads = Generator[None, None, T]
#: Takes the next piece of a text.
Sink = Callable[[str], object]

_SPACE = re.compile(r"\s*")


class NotACallError(Exception):
    """The text is not a tool call, or not a complete one; the message says why."""


class _Marks(NamedTuple):
    """Patterns that find the first of several marks."""

    whole: re.Pattern[str]
    beginning: re.Pattern[str]  # of a mark, at the end of the text
    first: re.Pattern[str]  # the first character of one
    longest: int


@cache
def _marks(marks: tuple[str, ...]) -> _Marks:
    whole = "|".join(re.escape(mark) for mark in sorted(marks, key=len, reverse=True))
    beginning = "|".join(_prefixes(mark[:-1]) for mark in marks if len(mark) > 1) or r"(?!)"
    first = "".join({re.escape(mark[0]) for mark in marks})
    return _Marks(
        re.compile(whole),
        re.compile(rf"(?:{beginning})\Z"),
        re.compile(f"[{first}]"),
        max(map(len, marks)),
    )


def _prefixes(mark: str) -> str:
    """A pattern for every non-empty prefix of a mark."""
    pattern = ""
    for character in reversed(mark[1:]):
        pattern = f"(?:{re.escape(character)}{pattern})?"
    return re.escape(mark[0]) + pattern


class TextStream:
    """The text so far, and a position in it."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._kept: list[str] | None = None
        #: While a reader passes text on: what would stop it, and where the text goes.
        self._passing: tuple[re.Pattern[str], Sink] | None = None

    def feed(self, piece: str) -> bool:
        """Add text. True if it was passed on already, so that the reader need not run."""
        if self._passing is not None:
            stop, sink = self._passing
            if stop.search(piece) is None:
                if self._kept is not None:
                    self._kept.append(piece)
                sink(piece)
                return True
            self._passing = None
        self._text = self._text[self._at :] + piece
        self._at = 0
        return False

    def end(self) -> None:
        """No more text comes."""
        self._ended = True
        self._passing = None

    # What a reader consumed can become plain text again if it turns out not to be a call.

    def keep(self, text: str = "") -> None:
        """Keep ``text`` and what is consumed from here on, until :meth:`kept`."""
        self._kept = [text]

    def kept(self) -> str:
        """What was consumed since :meth:`keep`, which ends here."""
        text = "".join(self._kept or ())
        self._kept = None
        return text

    # Readers. `yield from` them.

    def peek(self) -> Reads[str]:
        """The next character; empty at the end of the text."""
        while self._at == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._at]

    def take(self) -> Reads[str]:
        """Consume the next character. :raises NotACallError: the text has ended."""
        if not (character := (yield from self.peek())):
            raise NotACallError("the answer ends inside the call")
        self._consume(1)
        return character

    def at(self, mark: str) -> Reads[bool]:
        """Whether ``mark`` comes next."""
        while True:
            if self._text.startswith(mark, self._at):
                return True
            rest = len(self._text) - self._at
            if self._ended or rest >= len(mark) or not mark.startswith(self._text[self._at :]):
                return False
            yield

    def accept(self, *marks: str) -> Reads[str | None]:
        """Consume the first of ``marks`` that comes next, and return it; None if none does."""
        for mark in marks:
            if (yield from self.at(mark)):
                self._consume(len(mark))
                return mark
        return None

    def expect(self, mark: str) -> Reads[None]:
        """Consume ``mark``. :raises NotACallError: something else comes next."""
        if (yield from self.accept(mark)) is None:
            found = yield from self.peek()
            rest = self._text[self._at : self._at + len(mark)]
            if self._ended and mark.startswith(rest):
                raise NotACallError("the answer ends inside the call")
            raise NotACallError(f"expected {mark!r} in the call, found {found!r}")

    def space(self, sink: Sink | None = None) -> Reads[None]:
        """Consume whitespace."""
        yield from self.run(_SPACE, sink)

    def run(
        self,
        pattern: re.Pattern[str],
        sink: Sink | None = None,
        stop: re.Pattern[str] | None = None,
    ) -> Reads[None]:
        """Consume the characters that match a pattern like ``[a-z]*``.

        ``stop`` matches the first character that does not. It makes long runs fast.
        """
        while True:
            found = pattern.match(self._text, self._at)
            if found is not None and found.end() > self._at:
                text = self._consume(found.end() - self._at)
                if sink is not None:
                    sink(text)
            if self._at < len(self._text) or self._ended:
                return
            if stop is not None and sink is not None:
                self._passing = stop, sink
            yield

    def word(self, pattern: re.Pattern[str], limit: int) -> Reads[str]:
        """The characters that match (see :meth:`run`).

        :raises NotACallError: there are none, or more than ``limit``.
        """
        found = ""
        while len(found) <= limit:
            character = yield from self.peek()
            if not character or pattern.fullmatch(character) is None:
                break
            found += self._consume(1)
        if not found or len(found) > limit:
            raise NotACallError(
                f"a name in the call is longer than {limit} characters"
                if found
                else "the call has no name"
            )
        return found

    def until(self, marks: tuple[str, ...], sink: Sink) -> Reads[str | None]:
        """Pass text on until one of ``marks``; consume the mark and return it, None at the end."""
        patterns = _marks(marks)
        while True:
            found = patterns.whole.search(self._text, self._at)
            if found is not None:
                self._pass_on(found.start(), sink)
                self._consume(len(found[0]))
                return found[0]
            stop = len(self._text)
            if not self._ended:
                tail = max(self._at, stop - patterns.longest + 1)
                beginning = patterns.beginning.search(self._text, tail)
                stop = stop if beginning is None else beginning.start()
            self._pass_on(stop, sink)
            if self._ended:
                return None
            if stop == len(self._text):
                self._passing = patterns.first, sink
            yield

    def _pass_on(self, stop: int, sink: Sink) -> None:
        if stop > self._at:
            sink(self._consume(stop - self._at))

    def _consume(self, count: int) -> str:
        text = self._text[self._at : self._at + count]
        self._at += count
        if self._kept is not None:
            self._kept.append(text)
        return text
