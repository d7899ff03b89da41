"""Banned strings: an answer that completes one goes back to the token in which it began.

That token is forbidden at its position, and the position is drawn again: the same draw, without the
forbidden tokens. So the answer depends only on the request, like any other. Tokens in which a
banned string may still begin are held back, so nothing is returned that is taken back later.

*Bounded work.* A position forbids at most ``MAX_FORBIDDEN`` tokens, and an answer discards at most
``DISCARDED_PER_TOKEN`` tokens for each that it may have, plus ``MORE_DISCARDED``. An answer that
needs more ends with an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sdk.api.logprobs import Sampled
from sdk.engine.scheduling.request import Request, RequestStatus
from sdk.text.automaton import StringAutomaton
from sdk.text.banned import BannedMatch, BannedMatcher
from sdk.text.detokenizer import IncrementalDetokenizer
from sdk.text.stops import StopMatcher

MAX_FORBIDDEN = 256
DISCARDED_PER_TOKEN = 8
MORE_DISCARDED = 256


class Rewind(NamedTuple):
    """Only the first ``num_tokens`` tokens of the answer stay, and the next one must be none of
    ``forbidden``. ``problem``: why the answer ends instead.
    """

    num_tokens: int
    forbidden: tuple[int, ...] = ()
    #: Mirostat's target after the last token that stays; ``None``: as at the beginning.
    mirostat_mu: float | None = None
    problem: str | None = None


class Rewinder:
    """Holds back the tokens of one answer until they are certain (:class:`BannedMatcher`)."""

    def __init__(
        self,
        request: Request,
        banned: StringAutomaton,
        detokenizer: IncrementalDetokenizer,
        stops: StopMatcher | None,
    ) -> None:
        self._request = request
        self._matcher = BannedMatcher(banned, detokenizer, stops)
        self._held: list[Sampled] = []
        self._num_certain = 0  # tokens of the answer
        self._mirostat_mu: float | None = None  # after the last of these
        #: Position in the answer -> tokens that are forbidden there, up to the last rewind.
        self._forbidden: dict[int, tuple[int, ...]] = {}
        self._num_discarded = 0

    def read(self, sampled: Sequence[Sampled]) -> tuple[list[Sampled], Rewind | None]:
        """Take new tokens of the request. Returns those that are certain now, and where the answer
        must go back to, if it must.
        """
        request, matcher = self._request, self._matcher
        least = request.params.min_tokens
        hidden = request.status is RequestStatus.STOP and not (
            request.is_complete or request.params.include_stop_str_in_output
        )
        match = None
        for left, one in zip(range(len(sampled) - 1, -1, -1), sampled, strict=True):
            self._held.append(one)
            if hidden and not left:
                break  # EOS and stop tokens do not appear in the text
            match = matcher.push(one.token_id, self._num_known >= least)
            if match is not None or matcher.stopped:
                break
        if match is None and request.finished and not matcher.stopped:
            match = matcher.finish(self._num_known >= least)
        if match is not None:
            rewind = self._rewind(match)
            return self._take(matcher.take_certain()), rewind
        if matcher.stopped or request.finished:
            return self.take_all(), None
        return self._take(matcher.take_certain()), None

    def take_all(self) -> list[Sampled]:
        """All tokens that were held back; the answer has ended."""
        return self._take(len(self._held))

    @property
    def _num_known(self) -> int:
        return self._num_certain + len(self._held)

    def _take(self, count: int) -> list[Sampled]:
        if not count:
            return []
        taken, self._held = self._held[:count], self._held[count:]
        self._mirostat_mu = taken[-1].mirostat_mu
        self._num_certain += count
        for position in [one for one in self._forbidden if one < self._num_certain]:
            del self._forbidden[position]
        for sequence in self._request.sequences:
            sequence.num_certain = sequence.num_prompt_tokens + self._num_certain
        return taken

    def _rewind(self, match: BannedMatch) -> Rewind:
        """Discard the tokens from that on in which the banned string begins."""
        index, held = match.token, self._held
        token_id, position = held[index].token_id, self._num_certain + index
        self._num_discarded += len(held) - index
        self._matcher.rewind(index)
        del held[index:]
        # What was forbidden at later positions belonged to another text.
        self._forbidden = {at: ids for at, ids in self._forbidden.items() if at <= position}
        known = self._forbidden.get(position, ())
        self._forbidden[position] = forbidden = (*known, token_id)
        mu = held[-1].mirostat_mu if held else self._mirostat_mu
        problem = self._problem(match.text, token_id in known, len(forbidden))
        return Rewind(position, forbidden, mu, problem)

    def _problem(self, text: str, again: bool, num_forbidden: int) -> str | None:
        request = self._request
        limit = DISCARDED_PER_TOKEN * (request.max_len - request.num_prompt_tokens)
        limit += MORE_DISCARDED
        if again:
            reason = "the other parameters leave no other token where it begins"
        elif num_forbidden > MAX_FORBIDDEN:
            reason = f"{MAX_FORBIDDEN} other tokens at one position led to banned strings too"
        elif self._num_discarded > limit:
            reason = f"{limit} tokens were discarded, and banned strings keep appearing"
        else:
            return None
        return f"banned_strings: {text!r} cannot be avoided: {reason}; ban fewer strings"
