"""Drafts from text that is already there: what followed the last tokens when they occurred before.

Saxena 2023 (prompt lookup decoding): answers that quote, edit or summarize repeat parts of their
prompt. A request's prompt and answer are in a suffix automaton, which finds the longest match in
constant time. Recent answers to other requests are in further ones, shared by requests with the
same cache salt and adapter: with other salts, the time of a step would tell what others asked.
"""

from __future__ import annotations

from collections import OrderedDict

from sdk.engine.scheduling.drafts import Drafter
from sdk.engine.scheduling.request import Request
from sdk.engine.scheduling.suffix_automaton import SuffixAutomaton

#: Bytes of all automata: room for 35,000 to 70,000 tokens. A page of 16 tokens of SmolLM2 takes 368
#: KB, their states 8 KB.
LOOKUP_BYTES = 24 * 2**20
#: Tokens of a prompt that are read in one step: 6 ms, so that a step does not take much longer.
_TOKENS_PER_STEP = 4096
#: Between answers. No token has this id.
_SEPARATOR = -1
#: Tokens of its prompt that are kept before an answer, to find it when the same is asked again.
_CONTEXT = 32
_STATES_PER_TOKEN = 2

_Owner = tuple[str | None, str | None]  # salt, adapter


class _Reader:
    """The match of one request in its own text and in recent answers."""

    __slots__ = ("answers", "answers_match", "num_read", "text")

    def __init__(self, most: int | None) -> None:
        self.text = SuffixAutomaton(most)
        self.num_read = 0
        self.answers: SuffixAutomaton | None = None
        self.answers_match = 0, 0  # state, length


class RecentAnswers:
    """Answers of finished requests, by owner, in at most ``most_states`` states.

    The owners whose answers were added last are kept, and of one owner the last answers: a full
    automaton is replaced by one of its last answers that take half of it.
    """

    def __init__(self, most_states: int) -> None:
        self._most = most_states
        self._answers: OrderedDict[_Owner, SuffixAutomaton] = OrderedDict()

    @property
    def num_states(self) -> int:
        return sum(one.num_states for one in self._answers.values())

    def of(self, owner: _Owner) -> SuffixAutomaton | None:
        return self._answers.get(owner)

    def add(self, owner: _Owner, tokens: list[int]) -> None:
        """Add an answer, or its end if it is too long."""
        most = self._most // (2 * _STATES_PER_TOKEN)
        tokens = [*tokens[1 - most :], _SEPARATOR]
        answers = self._answers.setdefault(owner, SuffixAutomaton())
        self._answers.move_to_end(owner)
        if answers.num_states + _STATES_PER_TOKEN * len(tokens) > self._most:
            kept = answers.tokens[len(tokens) - most :] if len(tokens) < most else []
            answers = self._answers[owner] = SuffixAutomaton()
            tokens = kept + tokens
        for token in tokens:
            answers.append(token)
        while self.num_states > self._most:
            self._answers.popitem(last=False)

    def clear(self) -> None:
        self._answers.clear()


class PromptLookup(Drafter):
    """See :class:`sdk.engine.scheduling.drafts.Drafter`.

    ``num_bytes`` bounds the automata of running requests, and of recent answers if ``shares``: a
    third of it. A request for which nothing is left gets no drafts until another one ends.
    """

    def __init__(self, least: int, most: int | None, num_bytes: int, *, shares: bool) -> None:
        states = num_bytes // SuffixAutomaton.STATE_BYTES
        self.answers = RecentAnswers(states // 3) if shares else None
        self._states_left = states - states // 3 if shares else states
        self._least = least
        self._most = most
        self._readers: dict[Request, _Reader] = {}

    def match(self, request: Request) -> int:
        """See :class:`~sdk.engine.scheduling.drafts.Drafter`."""
        reader = self._readers.get(request)
        if reader is None:
            reader = self._readers[request] = _Reader(self._most)
        if not self._read(reader, request):
            return 0
        length = max(reader.text.match[0], reader.answers_match[1])
        return length if length >= self._least else 0

    def _read(self, reader: _Reader, request: Request) -> bool:
        """Read the request's new tokens. False: there are more, or no memory is left for them."""
        begin, known = reader.num_read, len(request.token_ids)
        end = min(known, begin + _TOKENS_PER_STEP)
        if _STATES_PER_TOKEN * (end - begin) > self._states_left:
            return False
        text = reader.text
        before = text.num_states
        answers = (
            None
            if self.answers is None
            else self.answers.of((request.job.cache_salt, request.adapter))
        )
        if answers is not reader.answers:  # these are new to the request
            reader.answers, reader.answers_match = answers, (0, 0)
            begin = max(0, begin - _CONTEXT)
        state, length = reader.answers_match
        index = begin
        for token in request.token_ids[begin:end]:
            if index >= reader.num_read:
                text.append(token)
            index += 1
            if answers is not None:
                state, length = answers.follow(state, length, token)
        reader.answers_match = state, length
        reader.num_read = end
        self._states_left -= text.num_states - before
        return end == known

    def propose(self, request: Request, most: int) -> list[int]:
        """See :class:`~sdk.engine.scheduling.drafts.Drafter`."""
        reader = self._readers[request]
        text, (state, length) = reader.text, reader.answers_match
        longer = length if self._most is None else min(length, self._most)
        if longer > text.match[0] and reader.answers is not None:
            end = reader.answers.end_of(state, length)
            found = reader.answers.tokens[end : end + most]
            if _SEPARATOR in found:
                found = found[: found.index(_SEPARATOR)]
            if found:
                return found
        own, end = text.match
        if own < self._least:
            return []
        found = text.tokens[end : end + most]
        while len(found) < most:  # the text repeats itself
            found += found[: most - len(found)]
        return found

    def end(self, request: Request) -> None:
        """See :class:`~sdk.engine.scheduling.drafts.Drafter`."""
        reader = self._readers.pop(request, None)
        if reader is None:
            return
        self._states_left += reader.text.num_states - 1
        if self.answers is not None and request.finish_reason in ("stop", "length"):
            first = max(0, request.num_prompt_tokens - _CONTEXT)
            self.answers.add((request.job.cache_salt, request.adapter), request.token_ids[first:])

    def reset(self) -> None:
        """See :class:`~sdk.engine.scheduling.drafts.Drafter`."""
        if self.answers is not None:
            self.answers.clear()
