"""The structured part of one answer: which tokens may follow, and how it is completed in time.

A matcher allows every token after which the text can still be completed, however long that takes.
So that an answer is complete when its tokens are used up, the *way* is known after every token:
tokens that complete the text, no more than there are left. A token after which no way is short
enough is replaced by the first token of the way before it. This depends only on the answer's own
tokens and limits, so it is the same in every batch, after a preemption, and with draft tokens.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Sequence

from sdk.kernels.mask_tasks import MaskTask
from sdk.structured.compiler import Grammar

#: How many tokens at the beginning of a way may be dropped when it is tried again.
_DROPPED = 4
#: The states that a search between two steps may compare: 5 ms.
_STATES = 60
#: What opened elements need is tried again: how many of them, and of how many tokens.
_MOST_OPENINGS, _LONGEST_OPENING = 8, 64


class Phase(enum.Enum):
    """What an answer's next token may be."""

    START = "the structure, or the mark that begins a reasoning section"
    REASONING = "anything"
    STRUCTURE = "the structure"


class StructuredAnswer:
    """Follows one answer. ``left``: the most tokens it may still have.

    ``reasoning``: the ids that begin and end a reasoning section, if the model has one. The
    structure begins after it.
    """

    def __init__(
        self,
        grammar: Grammar,
        prompt: Sequence[int],
        output: Iterable[int],
        left: int,
        reasoning: tuple[int, int] | None = None,
    ) -> None:
        self._grammar = grammar
        self._matcher = grammar.matcher.copy()
        self._search = grammar.tokens.search()
        self._ends = frozenset(grammar.tokens.vocabulary.eos_ids)
        #: Tokens that complete the structure; None: not known, but there are certainly enough left.
        self._way: tuple[int, ...] | None = grammar.way
        self._opens = 0  # opening brackets so far
        self._openings: list[tuple[int, ...]] = []
        self._start_reasoning, self._end_reasoning = reasoning or (-1, -1)
        self.phase = Phase.START
        if reasoning is not None and _ends_open(prompt, *reasoning):
            self.phase = Phase.REASONING
        self.left = left
        self.complete = False
        for token in output:
            self.accept(token)

    @property
    def vocab_size(self) -> int:
        """The ids that a mask covers."""
        return self._grammar.tokens.vocabulary.size

    @property
    def error(self) -> str | None:
        """Why the answer cannot go on; None: it can."""
        return self._matcher.error

    def task(self, row: int, drafts: Sequence[int] = ()) -> MaskTask | None:
        """What computes the masks of the next tokens; None while the model reasons."""
        if self.phase is Phase.REASONING:
            return None
        also = self._start_reasoning if self.phase is Phase.START else -1
        return MaskTask(self._matcher.handle, row, tuple(drafts), also)

    def accept(self, token: int) -> int:
        """The token that follows when ``token``, which the mask allowed, was drawn.

        :raises GrammarError: the matcher failed.
        """
        self.left -= 1
        if self.phase is not Phase.STRUCTURE:
            begins = self.phase is Phase.START and token == self._start_reasoning
            if begins or self.phase is Phase.REASONING:
                return self._reason(token)
            self.phase = Phase.STRUCTURE
        matcher = self._matcher
        if token in self._ends:
            self.complete = True
            return token
        matcher.consume((token,))
        way = self._way_after(token)
        if way is None and self._way is not None and not self._certain:
            matcher.rollback(1)
            if not self._way:  # the text before this token is complete
                self.complete = True
                return min(self._ends, default=token)
            token, *rest = self._way
            matcher.consume((token,))
            way = tuple(rest)
        self._way = way
        self._opens += int(self._grammar.tokens.shapes.opens[token])
        self.complete = matcher.stopped or (self.left <= 0 and matcher.accepting)
        return token

    def forced(self, most: int) -> Sequence[int]:
        """Up to ``most`` tokens that the structure leaves no choice about."""
        if self.phase is Phase.REASONING or self.complete:
            return ()
        return self._matcher.forced(most)

    def _reason(self, token: int) -> int:
        """A token of the reasoning section. It ends while there are tokens for the structure."""
        needed = len(self._grammar.way) + 1
        going_on = self.phase is Phase.REASONING
        if going_on and (self.left < needed or token in self._ends):
            token = self._end_reasoning
        self.phase = Phase.STRUCTURE if token == self._end_reasoning else Phase.REASONING
        return token

    @property
    def _certain(self) -> bool:
        """Whether the tokens that are left complete the structure whatever its state is."""
        return 0 < self._grammar.size * (self._opens + 2) < self.left

    def _way_after(self, token: int) -> tuple[int, ...] | None:
        """A way from the matcher's state, not longer than the tokens that are left."""
        if self._certain:
            return None
        rest: tuple[int, ...] = ()
        tried = self._ends_of_shortest()
        if self._way is not None:
            rests = self._rests(self._way, self._grammar.tokens.shapes.text(token))
            rest = rests[0]
            tried = itertools.chain(self._variants(rests), tried)
        for way in tried:
            if len(way) <= self.left and self._completes(way):
                return way
        if self._way is None:  # the first: there must be one
            return self._search.shortest(self._matcher, self.left)
        found = self._search.shortest(self._matcher, self.left, states=_STATES, thorough=False)
        if found is not None:
            self._remember(found, rest)
        return found

    def _ends_of_shortest(self) -> Iterable[tuple[int, ...]]:
        """The ends of the shortest answer, with something closed before it."""
        way = self._grammar.way
        for count in range(len(way), -1, -1):
            for closer in self._grammar.tokens.closers:
                yield (*closer, *way[count:])

    def _rests(self, way: tuple[int, ...], text: bytes) -> list[tuple[int, ...]]:
        """What may be left of a way after ``text``: without what they have in common, and, where
        ``text`` takes the place of the first tokens, what comes after it. Spaces do not count.
        """
        pieces = [self._grammar.tokens.shapes.text(token) for token in way]
        whole, text = b"".join(pieces), text.translate(None, b" ")
        found, begin = [], 0
        for dropped, piece in enumerate((b"", *pieces[:_DROPPED])):
            begin += len(piece)
            matched, end = _agreement(whole, begin, text)
            if not dropped or (matched == len(text) and text):
                found.append(self._from(way, pieces, whole, end if matched else begin))
        return found

    def _from(
        self, way: tuple[int, ...], pieces: Sequence[bytes], whole: bytes, at: int
    ) -> tuple[int, ...]:
        """The tokens of ``whole``, which are ``way`` with the texts ``pieces``, from ``at`` on."""
        end = 0
        for index, piece in enumerate(pieces):
            if end >= at:
                return way[index:]
            end += len(piece)
            if end > at:
                begun = whole[at:end].decode("utf-8", "replace")
                return (*self._grammar.tokens.encode(begun), *way[index + 1 :])
        return ()

    def _variants(self, rests: Sequence[tuple[int, ...]]) -> Iterable[tuple[int, ...]]:
        """Ways like the last one: the rest of it, and with something closed before it."""
        first = rests[0]
        for closer in self._grammar.tokens.closers:
            yield (*closer, *first)
        yield from rests[1:]
        for known in self._openings:
            yield (*known, *first)
        for count in range(1, min(_DROPPED, len(first)) + 1):
            yield first[count:]

    def _remember(self, way: tuple[int, ...], rest: tuple[int, ...]) -> None:
        """Keep what a way has before ``rest``: the next element of an array needs the same."""
        if 0 < len(way) - len(rest) <= _LONGEST_OPENING and way[len(way) - len(rest) :] == rest:
            opening = way[: len(way) - len(rest)]
            if opening not in self._openings:
                self._openings.append(opening)
                del self._openings[:-_MOST_OPENINGS]

    def _completes(self, way: tuple[int, ...]) -> bool:
        matcher = self._matcher
        if not way:
            return matcher.accepting
        if matcher.allowed(way) < len(way):
            return False
        matcher.consume(way)
        accepting = matcher.accepting
        matcher.rollback(len(way))
        return accepting


def _agreement(whole: bytes, begin: int, text: bytes) -> tuple[int, int]:
    """How many bytes of ``text`` follow ``begin`` in ``whole``, and where; spaces do not count."""
    at = begin
    for matched, byte in enumerate(text):
        while whole[at : at + 1] == b" ":
            at += 1
        if whole[at : at + 1] != bytes((byte,)):
            return matched, at
        at += 1
    return len(text), at


def _ends_open(prompt: Sequence[int], start: int, end: int) -> bool:
    """Whether the prompt ends inside a reasoning section."""
    for token in reversed(prompt):
        if token in (start, end):
            return token == start
    return False
