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
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from sdk.kernels.operators.mask_tasks import MaskTask
from sdk.structured.compiler import Grammar
from sdk.structured.library import GrammarError, Matcher

#: The first tokens of a way that are compared with a token; how many of them, and of their bytes,
#: the token may take the place of.
_HEAD, _DROPPED, _REPLACED = 8, 4, 16
#: The last tokens of the shortest answer that may end any other.
_ENDS = 8
#: The states that a search between two steps may compare: 5 ms.
_STATES = 60
#: Changes of a way that are tried again: how many of them, and of how many tokens.
_EDITS, _LONGEST_EDIT = 8, 64
#: A token that a way took the place of closes the answer if no more than this many tokens would be
#: left; else nothing could follow the token.
_NEAR = 64
#: How often changes may make a way longer until a short one is searched for again.
_MOST_LONGER = 16


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
        self._end = min(self._ends, default=None)
        self._closers = grammar.tokens.closers
        #: Tokens that complete the structure; None: not known, but there are certainly enough left.
        self._way: tuple[int, ...] | None = grammar.way
        self._opens = 0  # opening brackets so far
        #: Tokens that took the place of the first tokens of a way, and of how many.
        self._edits: deque[tuple[tuple[int, ...], int]] = deque(maxlen=_EDITS)
        self._longer = 0  # how often a change made the way longer since one was searched for
        self._start_reasoning, self._end_reasoning = reasoning or (-1, -1)
        #: Copies for masks of states that may be taken back (see ``Matcher``): after drafts, and
        #: where a way is searched for.
        self._drafting: Matcher | None = None
        self._probe: Matcher | None = None
        self.phase = Phase.START
        if reasoning is not None and _ends_open(prompt, *reasoning):
            self.phase = Phase.REASONING
        self.left = left
        self.complete = False
        #: The answer was completed because few tokens were left.
        self.closed = False
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
        self._drafting = self._matcher.copy() if drafts else None
        return MaskTask((self._drafting or self._matcher).handle, row, tuple(drafts), also)

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
        way = self._way_or_none(token)
        self._probe = None
        if way is None and self._way is not None and not self._certain:
            matcher.rollback(1)
            self.closed |= self.left < len(self._way) + _NEAR
            if not self._way:  # the text before this token is complete
                self.complete = True
                return token if self._end is None else self._end
            token, *rest = self._way
            matcher.consume((token,))
            way = tuple(rest)
        self._way = way
        self._opens += int(self._grammar.tokens.shapes.opens[token])
        self.complete = matcher.stopped or (self.left <= 0 and matcher.accepting)
        self.closed |= self.complete and not matcher.stopped
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
        return 0 < self._grammar.bound.after(self._opens) < self.left

    def _way_or_none(self, token: int) -> tuple[int, ...] | None:
        """:meth:`_way_after`, also where a search finds a state after which nothing may follow: the
        library knows that only when it gets there, and the copy is useless then."""
        try:
            return self._way_after(token)
        except GrammarError:
            if self._way is None:
                raise
            return self._way[1:] if self._way[:1] == (token,) else None

    @property
    def _copy(self) -> Matcher:
        """A matcher in the state of the answer's, for masks."""
        if self._probe is None:
            self._probe = self._matcher.copy()
        return self._probe

    def _way_after(self, token: int) -> tuple[int, ...] | None:
        """A way from the matcher's state, not longer than the tokens that are left."""
        if self._certain:
            return None
        last = self._way
        if last and last[0] == token:
            return last[1:]
        if last is None:  # the first: there must be one
            ends = [self._grammar.way[-count:] for count in range(1, len(self._grammar.way) + 1)]
            for ways in (self._ways_of_shortest(), self._bridged(ends)):
                way = self._first(ways)
                if way is not None and len(way) <= self.left:
                    return way
            return self._search.shortest(self._matcher, self.left)
        rests = iter(self._rests(last, token))
        rest = next(rests)  # nearly always right, inside a string
        edited = self._edited(last) if self._longer < _MOST_LONGER else ()
        way = self._first(itertools.chain((rest,), itertools.islice(rests, 1), edited))
        if way is not None and len(way) > len(last):
            self._longer += 1
        if way is None or (self._longer and len(way) > self.left):
            way, self._longer = self._far_way(rest, list(rests)), 0
            if way is not None:
                self._remember(last, way)
        return way if way is not None and len(way) <= self.left else None

    def _far_way(
        self, rest: tuple[int, ...], others: Sequence[tuple[int, ...]]
    ) -> tuple[int, ...] | None:
        """A way when neither ``rest`` of the last one nor a known change of it completes the text.
        Of the last one, ``others`` may be left too."""
        shortest = self._grammar.way
        ends = [rest, *others, *(shortest[-count:] for count in range(1, _ENDS + 1))]
        way = self._first(self._variants(rest, others))
        if way is None:
            way = self._first(self._bridged(ends))
        if way is None:
            way = self._search.shortest(
                self._matcher,
                self.left,
                states=_STATES,
                thorough=False,
                known_rest=lambda matcher: self._rest_of(matcher, ends),
            )
        return way

    def _first(self, ways: Iterable[tuple[int, ...]]) -> tuple[int, ...] | None:
        """The first way that completes the text with the tokens that are left, else one that takes
        more: a search would only find a longer one."""
        too_long = None
        for way in ways:
            if self._completes(way):
                if len(way) <= self.left:
                    return way
                too_long = way
        return too_long

    def _edited(self, way: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """A way with the changes that others needed, the last change first."""
        for head, dropped in reversed(self._edits):
            yield (*head, *way[dropped:])

    def _remember(self, last: tuple[int, ...], way: tuple[int, ...]) -> None:
        """Keep how ``way`` differs from the one before it: where a pattern repeats or an array has
        one more element, the same change is needed again."""
        pairs = zip(reversed(last), reversed(way), strict=False)
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        edit = way[: len(way) - same], len(last) - same
        if len(edit[0]) <= _LONGEST_EDIT and edit not in self._edits:
            self._edits.append(edit)

    def _rests(self, way: tuple[int, ...], token: int) -> Iterable[tuple[int, ...]]:
        """What may be left of a way after a token that is not its first: without what they have in
        common, and then without some of its first tokens."""
        shapes = self._grammar.tokens.shapes
        text, pieces = shapes.text(token), [shapes.text(one) for one in way[:_HEAD]]
        head = b"".join(pieces)
        agreed = _end_of_agreement(head, text)
        # the token takes the place of as many bytes, of less, or of whole tokens
        places = [*range(min(len(text), len(head)), -1, -1)[:_REPLACED]]
        tokens = itertools.accumulate(map(len, pieces[:_DROPPED]))
        for place in dict.fromkeys((agreed, *tokens, *places)):
            yield self._from(way, pieces, head, place)

    def _from(
        self, way: tuple[int, ...], pieces: Sequence[bytes], head: bytes, at: int
    ) -> tuple[int, ...]:
        """The tokens of a way, which begins with ``pieces`` that make up ``head``, from byte ``at``
        of it on."""
        end = 0
        for index, piece in enumerate(pieces):
            if end >= at:
                return way[index:]
            end += len(piece)
            if end > at:
                begun = head[at:end].decode("utf-8", "replace")
                return (*self._grammar.tokens.encode(begun), *way[index + 1 :])
        return way[len(pieces) :]

    def _variants(
        self, rest: tuple[int, ...], others: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[int, ...]]:
        """Ways like the last one, of which ``rest`` is left: with something closed before it, or
        something dropped; and ways like the shortest answer."""
        before = self._allowed(self._closers)
        yield from ((*one, *rest) for one in before)
        yield from self._allowed(others)
        yield from self._ways_of_shortest()

    def _ways_of_shortest(self) -> Iterator[tuple[int, ...]]:
        """The ends of the shortest answer, with something closed before it."""
        allows, way = self._search.mask(self._copy), self._grammar.way
        closers = [one for one in self._closers if allows(one[0])]
        for count in range(len(way), -1, -1):
            yield from ((*closer, *way[count:]) for closer in closers)
            if count == len(way) or allows(way[count]):
                yield way[count:]

    def _bridged(self, ends: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
        """Known ends of ways after one more token."""
        for token in self._search.candidates(self._copy):
            matcher = self._copy
            if not matcher.allowed((token,)):
                continue
            try:
                matcher.consume((token,))
                ways = [(token, *end) for end in self._allowed(ends)]
                matcher.rollback(1)
            except GrammarError:  # nothing may follow
                self._probe = None
                continue
            yield from ways

    def _rest_of(self, matcher: Matcher, ends: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
        """The first end that completes the text of ``matcher``."""
        allows = self._search.mask(matcher)
        known = (end for end in ends if not end or allows(end[0]))
        return next((end for end in known if self._completes(end, matcher)), None)

    def _allowed(self, ways: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Without those whose first token may not follow."""
        allows = self._search.mask(self._copy)
        return [way for way in ways if not way or allows(way[0])]

    def _completes(self, way: tuple[int, ...], matcher: Matcher | None = None) -> bool:
        matcher = matcher or self._matcher
        if not way:
            return matcher.accepting
        if self._end is not None:  # takes a third of the time of consuming them
            return matcher.allowed((*way, self._end)) > len(way)
        if matcher.allowed(way) < len(way):
            return False
        matcher.consume(way)
        accepting = matcher.accepting
        matcher.rollback(len(way))
        return accepting


def _end_of_agreement(head: bytes, text: bytes) -> int:
    """Where the bytes that ``text`` has in common with the beginning of ``head`` end in it. Spaces
    do not count, unless all of it agrees."""
    if head.startswith(text):
        return len(text)
    at = 0
    for byte in text.translate(None, b" "):
        place = at
        while head[place : place + 1] == b" ":
            place += 1
        if head[place : place + 1] != bytes((byte,)):
            break
        at = place + 1
    return at


def _ends_open(prompt: Sequence[int], start: int, end: int) -> bool:
    """Whether the prompt ends inside a reasoning section."""
    for token in reversed(prompt):
        if token in (start, end):
            return token == start
    return False
