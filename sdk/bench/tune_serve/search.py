"""Coordinate descent over the options of an engine: one option at a time, as long as it helps.

A full grid of four options has 144 points. Each of them needs a search for its highest rate. A
coordinate descent tries some 15 other values a round, and asks of each only whether it sustains a
rate a little above the best one so far. Most do not, and such a run ends at its second bad request
or so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sdk.bench.serve.summary import Summary
from sdk.bench.serve.sweep import LAST_RATE, sweep
from sdk.bench.tune_serve.space import Dimension, Options, shown

#: A change must raise the rate by more than the noise of measuring.
GAIN = 1.05
#: Rates grow by this factor: the best is usually near.
GROWTH = 1.3
#: Rounds over all options.
_ROUNDS = 3


class OutOfTime(Exception):
    """The time for the search is used up."""


class Trials(Protocol):
    """Runs of an engine with given options."""

    def run(self, options: Options, rate: float) -> Summary:
        """Offer a rate.

        :raises OutOfTime: there is no time for another run.
        :raises ImpossibleOptions: no engine can have these options.
        """
        ...


class ImpossibleOptions(Exception):
    """An engine cannot have these options, for example for lack of memory. The message says why."""


@dataclass(frozen=True, slots=True)
class Found:
    """Options, and the highest rate at which enough requests were good (0: none)."""

    options: Options
    rate: float


class Search:
    """Finds the options with the highest rate. ``say`` gets each decision and its reason."""

    def __init__(self, trials: Trials, needed: float, say: Callable[[str], None]) -> None:
        self._trials = trials
        self._needed = needed
        self._say = say

    def capacity(self, options: Options, first: float) -> float:
        """The highest rate of these options, looked for around ``first``; 0 if there is none."""
        rate, _ = sweep(
            lambda rate: self._trials.run(options, rate),
            self._needed,
            first=first,
            growth=GROWTH,
            tries=1,
        )
        return rate

    def descend(self, start: Options, first: float, space: Sequence[Dimension]) -> Found:
        """The best options that are found within the time, from ``start`` on.

        :raises OutOfTime: not even those of ``start`` could be measured.
        """
        best = Found(start, self.capacity(start, first))
        self._say(f"start: {shown(start)}: {best.rate:.3g} per second")
        try:
            for _ in range(_ROUNDS):
                before = best
                for dimension in space:
                    best = self._along(dimension, best, first)
                if best == before:
                    break
        except OutOfTime:
            self._say("the time is used up: the search ends here")
        return best

    def grid(self, first: float, space: Sequence[Dimension]) -> Iterator[Found]:
        """Every combination of values, as long as there is time. Impossible ones are left out."""
        for values in itertools.product(*(dimension.values for dimension in space)):
            options = {d.name: value for d, value in zip(space, values, strict=True)}
            try:
                rate = self.capacity(options, first)
            except ImpossibleOptions as error:
                self._say(f"{shown(options)}: not possible: {error}")
                continue
            except OutOfTime:
                self._say("the time is used up: the grid ends here; --seconds gives it more")
                return
            self._say(f"{shown(options)}: {rate:.3g} per second")
            yield Found(options, rate)

    def _along(self, dimension: Dimension, best: Found, first: float) -> Found:
        # All values: with 4 requests at a time instead of 64 a machine served twice as many within
        # a limit on the gaps between tokens, with 16 fewer.
        for value in _others(dimension, best.options[dimension.name]):
            options = {**best.options, dimension.name: value}
            rate = self._challenge(options, best, first, f"{dimension.name}={value}")
            if rate is not None:
                best = Found(options, rate)
        return best

    def _challenge(self, options: Options, best: Found, first: float, change: str) -> float | None:
        """The rate of ``options`` if it is clearly higher than the best one, otherwise ``None``."""
        asked = best.rate * GAIN or first / 4
        if asked > LAST_RATE:
            self._say(f"{change}: no: rates above {LAST_RATE:g} per second are not measured")
            return None
        try:
            summary = self._trials.run(options, asked)
            if (summary.good_share or 0.0) < self._needed:
                self._say(f"{change}: no: at {asked:.3g} per second {_why(summary)}")
                return None
            rate = self.capacity(options, asked * GROWTH)
        except ImpossibleOptions as error:
            self._say(f"{change}: not possible: {error}")
            return None
        rate = max(rate, asked)
        self._say(f"{change}: better: {rate:.3g} instead of {best.rate:.3g} per second")
        return rate


def _others(dimension: Dimension, value: Any) -> list[Any]:
    """The other values, of an ordered dimension the nearest first."""
    values = list(dimension.values)
    if not dimension.ordered or value not in values:
        return [other for other in values if other != value]
    here = values.index(value)
    order = sorted(range(len(values)), key=lambda index: abs(index - here))
    return [values[index] for index in order if index != here]


def _why(summary: Summary) -> str:
    kinds = ", ".join(f"{name} {count}" for name, count in summary.broken.items())
    return f"{summary.requests - (summary.good or 0)} of {summary.requests} not good ({kinds})"
