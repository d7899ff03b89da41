"""The results of a run: rates, latencies, goodput and errors of its requests.

The definitions are those of ``vllm bench serve``, except where docs/bench/load.md says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sdk.bench.serve.percentiles import Distribution
from sdk.bench.serve.record import Record
from sdk.bench.serve.slo import Slo

#: Latency -> what it is, in the order of a report.
LATENCIES = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2e": "end-to-end latency",
    "queue": "queue delay",
    "late": "sent late",
}


@dataclass(frozen=True, slots=True)
class Summary:
    """``duration_s``: from the first arrival to the last piece of text (or failure, if all failed).

    ``errors``: failed requests by kind. ``broken``: how many requests did not keep an objective;
    one request may count for several. ``good``: requests that kept all; ``None`` without an SLO.
    """

    requests: int
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    latencies: dict[str, Distribution]
    errors: dict[str, int] = field(default_factory=dict)
    good: int | None = None
    broken: dict[str, int] = field(default_factory=dict)

    @property
    def completed(self) -> int:
        return self.requests - sum(self.errors.values())

    @property
    def request_rate(self) -> float:
        """Completed requests per second."""
        return self._per_second(self.completed)

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second of completed requests."""
        return self._per_second(self.prompt_tokens)

    @property
    def output_rate(self) -> float:
        """Generated tokens per second of completed requests."""
        return self._per_second(self.output_tokens)

    @property
    def good_share(self) -> float | None:
        """The share of all requests, failed ones included, that kept every objective."""
        if self.good is None:
            return None
        return self.good / self.requests if self.requests else 0.0

    @property
    def good_rate(self) -> float | None:
        """Good requests per second (vLLM's request goodput)."""
        return None if self.good is None else self._per_second(self.good)

    def _per_second(self, count: int) -> float:
        return count / self.duration_s if self.duration_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "requests": self.requests,
            "completed": self.completed,
            "errors": self.errors,
            "duration_s": round(self.duration_s, 6),
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "requests_per_s": round(self.request_rate, 6),
            "prompt_tokens_per_s": round(self.prompt_rate, 6),
            "output_tokens_per_s": round(self.output_rate, 6),
        }
        for name, values in self.latencies.items():
            found[f"{name}_s"] = values.to_json()
        if self.good is not None:
            found |= {
                "good": self.good,
                "good_share": round(self.good_share or 0.0, 6),
                "good_per_s": round(self.good_rate or 0.0, 6),
                "broken": self.broken,
            }
        return found


def summarize(records: Sequence[Record], slo: Slo | None = None) -> Summary:
    """The summary of finished requests, in any order."""
    fine = [record for record in records if record.error is None]
    begin = min((record.due for record in records), default=0.0)
    end = max((record.last for record in fine or records), default=begin)
    samples: dict[str, list[float]] = {
        "ttft": [record.ttft for record in fine],
        "itl": [gap for record in fine for gap in record.gaps],
        "tpot": [record.tpot for record in fine if record.tpot is not None],
        "e2e": [record.e2e for record in fine],
        "queue": [record.queue_s for record in fine if record.queue_s is not None],
        "late": [record.sent - record.due for record in fine],
    }
    distributions = {name: Distribution.of(samples[name]) for name in LATENCIES}
    broken: Counter[str] = Counter()
    good = None
    if slo is not None:
        kinds = [slo.broken_by(record) for record in records]
        good = kinds.count([])
        broken.update(kind for found in kinds for kind in found)
    return Summary(
        requests=len(records),
        duration_s=max(end - begin, 0.0),
        prompt_tokens=sum(record.prompt_tokens for record in fine),
        output_tokens=sum(record.output_tokens for record in fine),
        latencies={name: found for name, found in distributions.items() if found is not None},
        errors=dict(Counter(record.error for record in records if record.error is not None)),
        good=good,
        broken=dict(broken),
    )
