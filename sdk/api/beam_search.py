"""Beam search: its parameters and its results. Names are those of vLLM.

The search itself (:class:`Beams`) takes the steps that transformers takes, with its defaults: it
keeps ``beam_width`` unfinished beams and the best ``beam_width`` finished ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from sdk.api.errors import RequestError
from sdk.api.logprobs import Logprob
from sdk.api.params import MAX_N
from sdk.kernels.dataclass import dataclass
from sdk.quant.safe_repr import safe_repr

_INT31 = 2**31 - 1


@dataclass(frozen=True, slots=True)
class BeamSearchParams:
    """How beams are searched.

    ``beam_width`` beams of at most ``max_tokens`` tokens are searched and returned. A finished beam
    is ranked by its log-probability divided by ``length ** length_penalty``, where the length is
    that of the answer: a larger penalty favors longer answers.

    ``early_stopping``: ``True`` ends the search when ``beam_width`` beams are finished, ``False``
    when no unfinished beam of the present length could rank among them, ``"never"`` when none of
    any length could. ``ignore_eos``: beams do not end at EOS. ``temperature``: 0 or 1, because
    beams are ranked by the model's own log-probabilities.

    :raises RequestError: a value is out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        for name, most in (("beam_width", MAX_N), ("max_tokens", _INT31)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise _invalid(name, f"an integer in [1, {most}]", value)
        if not isinstance(self.ignore_eos, bool):
            raise _invalid("ignore_eos", "True or False", self.ignore_eos)
        if isinstance(self.temperature, bool) or self.temperature not in (0, 1):
            raise _invalid(
                "temperature",
                "0 or 1 (beams are ranked by the model's own log-probabilities)",
                self.temperature,
            )
        penalty = self.length_penalty
        number = isinstance(penalty, int | float) and not isinstance(penalty, bool)
        if not number or not math.isfinite(penalty) or abs(penalty) > 100:
            raise _invalid("length_penalty", "a number in [-100, 100]", penalty)
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise _invalid("early_stopping", 'True, False or "never"', self.early_stopping)


def _invalid(name: str, expected: str, found: object) -> RequestError:
    return RequestError(f"{name}: expected {expected}, found {safe_repr(found)}")


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One finished beam. As in vLLM, ``tokens`` and ``text`` begin with the prompt.

    ``cum_logprob``: the sum of the answer's log-probabilities; ``score``: divided by the length
    penalty. ``logprobs``: the candidates at each token of the answer. ``stop_reason``: the token
    id, if another token than EOS ended it.
    """

    tokens: list[int]
    logprobs: list[Mapping[int, Logprob]]
    cum_logprob: float
    score: float
    text: str | None = None
    finish_reason: Literal["stop", "length"] = "length"
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


class Beam(NamedTuple):
    """An answer so far, and the candidates at each of its tokens."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[Mapping[int, Logprob], ...] = ()
    cum_logprob: float = 0.0


class Finished(NamedTuple):
    """A beam that has ended, with its rank: the log-probability after the length penalty."""

    score: float
    beam: Beam
    ended: bool  # at an end token, not at the limit


class Beams:
    """The beams of one prompt."""

    def __init__(self, params: BeamSearchParams, ends: Iterable[int], most_tokens: int) -> None:
        """``ends``: tokens that end a beam. ``most_tokens``: the context has room for as many."""
        self._params = params
        self._ends = frozenset() if params.ignore_eos else frozenset(ends)
        self._max_tokens = min(params.max_tokens, most_tokens)
        self._length = 0
        self._can_improve = True
        self.running: list[Beam] = [Beam()]
        self.finished: list[Finished] = []
        self.done = False

    @property
    def num_candidates(self) -> int:
        """Continuations to look at: even if all end tokens are among them, enough go on."""
        return max(2, 1 + len(self._ends)) * self._params.beam_width

    def advance(self, candidates: Sequence[Mapping[int, Logprob]]) -> None:
        """Take one step. ``candidates``: for each running beam the best next tokens."""
        width = self._params.beam_width
        found = [
            (beam.cum_logprob + entry.logprob, beam, token, row)
            for beam, row in zip(self.running, candidates, strict=True)
            for token, entry in row.items()
        ]
        found.sort(key=lambda one: -one[0])  # stable, so ties keep their order
        best = [
            Beam((*beam.tokens, token), (*beam.logprobs, row), total)
            for total, beam, token, row in found[: self.num_candidates]
        ]
        self._length += 1
        at_limit = self._length >= self._max_tokens
        self._finish([beam for beam in best[:width] if at_limit or self._ended(beam)])
        self.running = [beam for beam in best if not at_limit and not self._ended(beam)][:width]
        self._update_done()

    def _ended(self, beam: Beam) -> bool:
        return beam.tokens[-1] in self._ends

    def _finish(self, beams: Iterable[Beam]) -> None:
        """Keep the best finished beams. Only those among the first ``beam_width`` candidates get
        here: the others are there so that enough unfinished ones are left."""
        full = len(self.finished) == self._params.beam_width
        if not self._can_improve or (full and self._params.early_stopping is True):
            return
        divisor = self._length**self._params.length_penalty
        new = [Finished(beam.cum_logprob / divisor, beam, self._ended(beam)) for beam in beams]
        ranked = sorted([*self.finished, *new], key=lambda one: -one.score)
        self.finished = ranked[: self._params.beam_width]

    def _update_done(self) -> None:
        params = self._params
        full = len(self.finished) == params.beam_width
        if not self.running or (full and params.early_stopping is True):
            self.done = True
            return
        length = self._length
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self._max_tokens
        attainable = self.running[0].cum_logprob / length**params.length_penalty
        self._can_improve &= not full or attainable > self.finished[-1].score
        self.done = not self._can_improve
