"""Finds banned strings in the text of one answer, and the tokens in which they begin.

A token is *certain* once no banned string can begin in it any more, whatever follows, and whatever
is taken back. Before that its text must not be shown. For every token that is not certain, the
state of the text before it is kept, so that the text can go back there without reading the answer
again.
"""

from __future__ import annotations

from typing import NamedTuple

from sdk.api.params import SamplingParams
from sdk.text.automaton import StringAutomaton
from sdk.text.detokenizer import IncrementalDetokenizer
from sdk.text.stops import StopMatcher


def banned_strings(params: SamplingParams) -> StringAutomaton | None:
    """The banned strings of one request; None if it has none."""
    return StringAutomaton(params.banned_strings) if params.banned_strings else None


class BannedMatch(NamedTuple):
    """A banned string, and the token in which it begins: one of those that are not certain."""

    text: str
    token: int


class _Before(NamedTuple):
    """The text before one token. Nothing in it changes."""

    detokenizer: IncrementalDetokenizer
    stops: StopMatcher | None
    automaton: int
    #: Characters so far.
    length: int


class BannedMatcher:
    """Reads the tokens of one answer. Not shared between threads.

    ``detokenizer`` and ``stops`` (the answer's stop strings) are at the beginning of the answer. A
    stop string that is complete before a banned one ends the answer, so all tokens are certain.
    """

    def __init__(
        self,
        banned: StringAutomaton,
        detokenizer: IncrementalDetokenizer,
        stops: StopMatcher | None = None,
    ) -> None:
        self._banned = banned
        #: Before each token that is not certain, and after the last one.
        self._states = [_Before(detokenizer, stops, 0, 0)]
        self.stopped = False

    def push(self, token_id: int, can_stop: bool = True) -> BannedMatch | None:
        """Read the next token. Returns the banned string that it completes, if any: then the text
        must go back (:meth:`rewind`). ``can_stop``: see :meth:`StopMatcher.push`.
        """
        detokenizer = self._states[-1].detokenizer.copy()
        text = detokenizer.push(token_id)
        return self._read(text, detokenizer, can_stop)

    def finish(self, can_stop: bool = True) -> BannedMatch | None:
        """The answer has ended: read the text that was not final yet, as :meth:`push` does."""
        detokenizer = self._states[-1].detokenizer
        if not detokenizer.waits:
            return None
        detokenizer = detokenizer.copy()
        match = self._read(detokenizer.finish(), detokenizer, can_stop)
        if match is None:
            return None
        return match._replace(token=min(match.token, len(self._states) - 2))

    def _read(
        self, text: str, detokenizer: IncrementalDetokenizer, can_stop: bool
    ) -> BannedMatch | None:
        _, stops, state, length = self._states[-1]
        stops = None if stops is None else stops.copy()
        for character in text:
            state = self._banned.follow(state, character)
            length += 1
            if (found := self._banned.found[state]) is not None:
                last = len(self._states) - 1
                return BannedMatch(found, self._token_of(length - len(found), last))
            if stops is not None and stops.push(character, can_stop).stop is not None:
                self.stopped = True
                return None
        self._states.append(_Before(detokenizer, stops, state, length))
        return None

    def take_certain(self) -> int:
        """How many more tokens are certain since the last call.

        The next token may itself be taken back, so no string may begin in the text before it.
        """
        count = len(self._states) - 1
        while (begin := self._first_held(count)) < count:
            count = begin
        del self._states[:count]
        return count

    def _first_held(self, index: int) -> int:
        """The first token in which a string may have begun when token ``index`` was to come."""
        state = self._states[index]
        return self._token_of(state.length - self._banned.depth[state.automaton], index)

    def rewind(self, index: int) -> None:
        """Go back to the text before token ``index`` of those that are not certain."""
        del self._states[index + 1 :]

    def _token_of(self, position: int, index: int) -> int:
        """The token with a character, by the character's position in the text; at most ``index``.

        The first bytes of the character may be in earlier tokens: then it is the first of these.
        """
        states = self._states
        while states[index].length > position:
            index -= 1
        while index and states[index].length == position and states[index].detokenizer.waits:
            index -= 1
        return index
