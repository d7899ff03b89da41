"""What ``llm.stats()`` returns: histograms and counts of one engine at one moment."""

from __future__ import annotations

from collections.abc import Mapping

from sdk.kernels.dataclass import dataclass
from sdk.metrics.histogram import HistogramData
from sdk.metrics.slo import SLO


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Of all answers, or of those of one tenant or adapter, since the engine was built.

    Histograms of seconds: ``ttft`` (from arrival to the first token), ``queue_time`` (from the
    queue to the first step), ``prefill_time`` (from there to the first token), ``decode_time``
    (from the first token to the last), ``inference_time`` (both), ``tpot`` (the mean time per token
    after the first), ``e2e`` (from arrival to the end). Histograms of tokens: ``prompt_tokens``,
    ``generation_tokens``. As in vLLM, each of a request's ``n`` answers counts, and a time between
    two events includes preemptions.

    ``finished`` counts answers by finish reason. ``num_within_slo`` counts those that ended with
    ``stop`` or ``length`` within the SLO, ``num_judged`` all that ended while there was one.
    """

    ttft: HistogramData
    queue_time: HistogramData
    prefill_time: HistogramData
    decode_time: HistogramData
    inference_time: HistogramData
    tpot: HistogramData
    e2e: HistogramData
    prompt_tokens: HistogramData
    generation_tokens: HistogramData
    finished: Mapping[str, int]
    num_unfinished: int
    num_within_slo: int
    num_judged: int

    @property
    def num_finished(self) -> int:
        """All answers that ended."""
        return sum(self.finished.values())

    @property
    def slo_attainment(self) -> float:
        """The share of answers within the SLO, of those that ended while there was one; 1 without
        any."""
        return self.num_within_slo / self.num_judged if self.num_judged else 1.0


def flat_numbers(
    requests: RequestStats, inter_token_latency: HistogramData, step_seconds: HistogramData
) -> dict[str, float]:
    """Means and percentiles under the names of ``get_metrics()``; 0 where there are no values."""
    found: dict[str, float] = {
        f"num_finished_{reason}": count for reason, count in requests.finished.items()
    }
    found["num_within_slo"] = requests.num_within_slo
    found["slo_attainment"] = requests.slo_attainment
    for name, data in (
        ("ttft", requests.ttft),
        ("itl", inter_token_latency),
        ("tpot", requests.tpot),
        ("e2e", requests.e2e),
        ("queue_time", requests.queue_time),
        ("step_time", step_seconds),
    ):
        found[f"{name}_mean"] = data.mean if data.count else 0.0
        for percent in (50, 95, 99):
            found[f"{name}_p{percent}"] = data.quantile(percent / 100) if data.count else 0.0
    return found


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One engine at one moment. Later snapshots can be subtracted histogram by histogram.

    ``metrics``: the numbers of ``get_metrics()``. ``requests``: of all answers; ``by_tenant`` and
    ``by_adapter``: of those that have one (from the 65th tenant or adapter on, under
    ``"(other)"``). ``inter_token_latency``: seconds between two steps that gave an answer tokens,
    as in vLLM: with accepted drafts such a step gives several. ``step_seconds`` and
    ``step_tokens``: of each step. ``longest_answer``: of each request that ended, the tokens of the
    longest of its answers. ``slo``: what ``num_within_slo`` counts now.
    """

    metrics: Mapping[str, float]
    requests: RequestStats
    by_tenant: Mapping[str, RequestStats]
    by_adapter: Mapping[str, RequestStats]
    inter_token_latency: HistogramData
    step_seconds: HistogramData
    step_tokens: HistogramData
    longest_answer: HistogramData
    slo: SLO | None
