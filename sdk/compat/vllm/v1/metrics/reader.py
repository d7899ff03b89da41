"""The metrics of an engine as objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass
class Metric:
    """A number with vLLM's name (``vllm:...``) and labels."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A count that only grows."""

    value: int


@dataclass
class Vector(Metric):
    """Counts in an order. vLLM has one, of accepted drafts by position; here there is none."""

    values: list[int]


@dataclass
class Gauge(Metric):
    """A number that rises and falls."""

    value: float


@dataclass
class Histogram(Metric):
    """``buckets``: upper bound as text ("0.1", "+Inf") -> observations up to it."""

    count: int
    sum: float
    buckets: dict[str, int]


class MetricsReader:
    """Reads what :func:`sdk.metrics.prometheus.collector` shows."""

    def __init__(self, llm: Any) -> None:
        from sdk.metrics.prometheus import collector  # needs prometheus-client

        self._collector = collector(llm, labels={"engine": "0"}, prefix="vllm")

    def read(self) -> list[Metric]:
        """All metrics now."""
        return [found for family in self._collector.collect() for found in _metrics(family)]


def _metrics(family: Any) -> Iterator[Metric]:
    if family.type == "histogram":
        yield from _histograms(family)
        return
    for sample in family.samples:
        labels = dict(sample.labels)
        if family.type == "gauge":
            yield Gauge(family.name, labels, sample.value)
        elif family.type == "counter" and sample.name.endswith("_total"):
            yield Counter(family.name, labels, int(sample.value))


def _histograms(family: Any) -> Iterator[Histogram]:
    """One for each set of labels."""
    found: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in family.samples:
        labels = {name: text for name, text in sample.labels.items() if name != "le"}
        one = found.setdefault(
            tuple(sorted(labels.items())), Histogram(family.name, labels, 0, 0.0, {})
        )
        if sample.name.endswith("_bucket"):
            one.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            one.count = int(sample.value)
        elif sample.name.endswith("_sum"):
            one.sum = sample.value
    yield from found.values()
