"""What a simulation has measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sdk.api.errors import RequestError
from sdk.metrics.histogram import Histogram
from sdk.metrics.percentiles import percentile as of_sorted
from sdk.metrics.slo import SLO


@dataclass(slots=True)
class ClassResults:
    """The requests of one kind, in the order of their ends; seconds."""

    ttft: list[float] = field(default_factory=list)
    #: Mean time between the tokens of an answer of two or more.
    itl: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    num_good: int = 0  # that met the objective
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: ClassResults) -> ClassResults:
        return ClassResults(
            self.ttft + other.ttft,
            self.itl + other.itl,
            self.e2e + other.e2e,
            self.num_good + other.num_good,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
        )


@dataclass(slots=True)
class Results:
    """A simulation's results. ``seconds`` of the virtual clock, from the first arrival on."""

    slo: SLO
    classes: dict[str, ClassResults] = field(default_factory=dict)
    #: Times between tokens, of all requests and tokens.
    gaps: Histogram = field(default_factory=Histogram)
    seconds: float = 0.0
    busy_seconds: float = 0.0
    replica_seconds: float = 0.0  # of all replicas, from their start to their end
    num_steps: int = 0
    #: Requests that another replica had to take over, and turns of a session that another replica
    #: ran than the turn before.
    num_rerouted: int = 0
    num_moved_turns: int = 0
    num_preemptions: int = 0
    #: Moments and numbers of replicas, whenever the number changed.
    replicas: list[tuple[float, int]] = field(default_factory=list)

    @property
    def all(self) -> ClassResults:
        """All classes together."""
        return sum(self.classes.values(), ClassResults())

    @property
    def utilization(self) -> float:
        """The share of the replicas' time in which a step ran."""
        return self.busy_seconds / self.replica_seconds if self.replica_seconds else 0.0

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were cached."""
        total = self.all
        return total.cached_tokens / total.prompt_tokens if total.prompt_tokens else 0.0

    @property
    def goodput(self) -> float:
        """Requests per second that met the objective."""
        return self.all.num_good / self.seconds if self.seconds else 0.0

    def ended(
        self, kind: str, ttft: float, e2e: float, prompt: int, cached: int, answer: int
    ) -> None:
        """A request of ``kind`` has ended, after ``answer`` tokens."""
        found = self.classes.get(kind)
        if found is None:
            found = self.classes[kind] = ClassResults()
        itl = (e2e - ttft) / (answer - 1) if answer > 1 else None
        found.ttft.append(ttft)
        found.e2e.append(e2e)
        if itl is not None:
            found.itl.append(itl)
        found.num_good += self.slo.is_met(ttft, itl, e2e)
        found.prompt_tokens += prompt
        found.cached_tokens += cached
        found.output_tokens += answer


def percentile(values: Sequence[float], percent: float) -> float:
    """A percentile of values in any order; NaN without values."""
    return of_sorted(sorted(values), percent) if values else math.nan


def deviation(simulated: Sequence[float], measured: Sequence[float]) -> Mapping[str, float]:
    """How far simulated times to the first token are from measured ones of the same requests:
    ``simulated / measured - 1`` of the mean and of percentiles.

    :raises RequestError: there are none, or not as many of both.
    """
    if not simulated or len(simulated) != len(measured):
        raise RequestError(
            f"deviation: expected as many simulated times as measured ones, found {len(simulated)} "
            f"and {len(measured)}"
        )
    pairs = {"mean": (sum(simulated) / len(simulated), sum(measured) / len(measured))}
    for percent in (50, 90, 99):
        pairs[f"p{percent}"] = percentile(simulated, percent), percentile(measured, percent)
    return {name: ours / theirs - 1 for name, (ours, theirs) in pairs.items()}
