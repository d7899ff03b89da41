"""Synthetic requests: chats, documents and completions.

Texts are random bytes, drawn from the seed and the number of the session alone: they are the same
whatever the router does. A session is one or several turns. A turn's prompt is all that was said
before and something new; it comes some time after the last answer has ended, as in a conversation.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from sdk.api.errors import RequestError
from sdk.cluster.simulation.executor import END

#: An answer may be this long; the model ends it earlier, and the router does not know when.
MAX_TOKENS = 1024


@dataclass(slots=True)
class SimulatedRequest:
    """One request. ``answer`` ends with :data:`END`. ``kind``: the class in the results.

    ``number``: of the request in the workload; ``session`` and ``turn``: where it belongs.
    """

    number: int
    kind: str
    arrival: float
    prompt: Sequence[int]
    answer: Sequence[int]
    session: int
    turn: int = 0
    max_tokens: int = MAX_TOKENS


class Workload(Protocol):
    """Requests, in the order of their arrival."""

    def arrivals(self) -> Iterator[SimulatedRequest]:
        """Those that do not depend on an answer."""

    def next_turn(self, request: SimulatedRequest, now: float) -> SimulatedRequest | None:
        """What comes after ``request`` has ended at ``now``; ``None``: nothing."""


@dataclass(frozen=True, slots=True)
class SessionKind:
    """How the sessions of one kind are drawn; lengths are medians of lognormal distributions, in
    tokens, with a sigma of ``spread``. ``prompt`` is the first text of a user, ``later`` the
    following ones. ``systems`` different texts of ``system`` tokens begin the prompts."""

    prompt: int
    answer: int
    later: int = 0
    turns: float = 1.0  # mean
    think: float = 0.0  # mean seconds between an answer and the next turn
    systems: int = 0
    system: int = 0
    least: int = 1  # tokens of the first text
    spread: float = 0.6


#: The kinds of a mix, by name.
KINDS: Mapping[str, SessionKind] = {
    "chats": SessionKind(60, 120, later=40, turns=4.0, think=15.0, systems=4, system=400),
    "documents": SessionKind(2800, 120, later=40, turns=1.3, think=15.0, least=2000, spread=0.3),
    "completions": SessionKind(120, 30, spread=0.7),
}


def parse_mix(text: str) -> dict[str, float]:
    """Read ``"chats=0.7,documents=0.1,completions=0.2"``: the share of each kind.

    :raises RequestError: it is something else.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        try:
            share = float(value)
        except ValueError:
            share = math.nan
        if name not in KINDS or name in found or not 0 <= share < math.inf:
            raise RequestError(
                f"mix: expected shares of {', '.join(KINDS)}, such as chats=0.9,documents=0.1; "
                f"found {part.strip()!r:.60}"
            )
        found[name] = share
    if not sum(found.values()) > 0:
        raise RequestError(f"mix: expected a share above 0, found {text!r:.60}")
    return found


@dataclass(slots=True)
class SyntheticWorkload:
    """Sessions that begin at ``times``, until there were ``num_requests`` requests.

    :raises RequestError: the context is too short for prompts with answers of ``MAX_TOKENS``.
    """

    mix: Mapping[str, float]
    times: Sequence[float]
    num_requests: int
    seed: int = 0
    #: No prompt with its answer is longer than this.
    max_model_len: int = 8192
    _count: int = field(default=0, init=False)
    _systems: dict[tuple[str, int], bytes] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        least = MAX_TOKENS + 64 + max(KINDS[kind].system for kind in self.mix)
        if self.max_model_len < least:
            raise RequestError(
                f"max_model_len: these requests need at least {least} tokens, found "
                f"{self.max_model_len}; play a trace of shorter ones"
            )

    def arrivals(self) -> Iterator[SimulatedRequest]:
        """The first turns of all sessions."""
        self._count = 0
        kinds, shares = list(self.mix), list(self.mix.values())
        for session, time in enumerate(self.times):
            if self._count >= self.num_requests:
                return
            draw = self._draw(session, 0)
            kind = draw.choices(kinds, shares)[0]
            shape = KINDS[kind]
            opening = self._system(kind, draw.randrange(shape.systems)) if shape.systems else b""
            length = max(_lognormal(draw, shape.prompt, shape.spread), shape.least)
            yield self._request(draw, kind, time, opening, length, session, 0)

    def next_turn(self, request: SimulatedRequest, now: float) -> SimulatedRequest | None:
        """The session goes on with a probability that gives the mean number of turns."""
        shape = KINDS[request.kind]
        if shape.turns <= 1 or self._count >= self.num_requests:
            return None
        draw = self._draw(request.session, request.turn + 1)
        if draw.random() >= 1 - 1 / shape.turns:
            return None
        before = bytes(request.prompt) + bytes(request.answer[:-1])
        length = _lognormal(draw, shape.later, shape.spread)
        arrival = now + draw.expovariate(1 / shape.think)
        if len(before) + length + MAX_TOKENS > self.max_model_len:
            return None
        turn = request.turn + 1
        return self._request(draw, request.kind, arrival, before, length, request.session, turn)

    def _request(
        self,
        draw: random.Random,
        kind: str,
        arrival: float,
        before: bytes,
        length: int,
        session: int,
        turn: int,
    ) -> SimulatedRequest:
        shape = KINDS[kind]
        self._count += 1
        length = min(length, self.max_model_len - MAX_TOKENS - len(before))
        answer = min(_lognormal(draw, shape.answer, shape.spread), MAX_TOKENS - 1)
        return SimulatedRequest(
            number=self._count - 1,
            kind=kind,
            arrival=arrival,
            prompt=before + draw.randbytes(length),
            answer=[*draw.randbytes(answer), END],
            session=session,
            turn=turn,
        )

    def _draw(self, session: int, turn: int) -> random.Random:
        return random.Random(f"{self.seed}/{session}/{turn}")

    def _system(self, kind: str, number: int) -> bytes:
        name = kind, number
        if name not in self._systems:
            draw = random.Random(f"{self.seed}/{kind}/{number}")
            self._systems[name] = draw.randbytes(KINDS[kind].system)
        return self._systems[name]


def _lognormal(draw: random.Random, median: int, spread: float) -> int:
    return max(round(draw.lognormvariate(math.log(median), spread)), 1)
