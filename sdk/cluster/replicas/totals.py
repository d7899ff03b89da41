"""The numbers of several engines together."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import reduce
from operator import add

from sdk.engine.stage_times import bubble
from sdk.metrics.histogram import HistogramData
from sdk.metrics.stats import EngineStats, RequestStats, flat_numbers

#: Shares, each with the counts that it is computed from.
_SHARES = {
    "draft_acceptance_rate": ("num_accepted_tokens", "num_draft_tokens"),
    "cache_hit_rate": ("prefix_hits", "prefix_queries"),
    "kv_usage": ("num_pages_used", "num_pages"),
}


def total_stats(parts: Sequence[EngineStats]) -> EngineStats:
    """The sum of all engines."""
    requests = _total_requests([one.requests for one in parts])
    intervals = _sum([one.inter_token_latency for one in parts])
    steps = _sum([one.step_seconds for one in parts])
    found: dict[str, float] = {}
    for one in parts:
        for name, value in one.metrics.items():
            found[name] = found.get(name, 0) + value
    for name, (part, whole) in _SHARES.items():
        found[name] = found[part] / found[whole] if found[whole] else 0.0
    stages = [value for name, value in found.items() if re.fullmatch(r"stage_\d+_seconds", name)]
    if stages:
        found["pipeline_bubble"] = bubble(stages, found["pipeline_seconds"])
    found.update(flat_numbers(requests, intervals, steps))
    return EngineStats(
        metrics=found,
        requests=requests,
        by_tenant=_by_label([one.by_tenant for one in parts]),
        by_adapter=_by_label([one.by_adapter for one in parts]),
        inter_token_latency=intervals,
        step_seconds=steps,
        step_tokens=_sum([one.step_tokens for one in parts]),
        longest_answer=_sum([one.longest_answer for one in parts]),
        slo=parts[0].slo,
    )


def _sum(parts: Iterable[HistogramData]) -> HistogramData:
    return reduce(add, parts)


def _by_label(parts: Sequence[Mapping[str, RequestStats]]) -> dict[str, RequestStats]:
    labels = dict.fromkeys(label for one in parts for label in one)
    return {
        label: _total_requests([one[label] for one in parts if label in one]) for label in labels
    }


def _total_requests(parts: Sequence[RequestStats]) -> RequestStats:
    finished: Counter[str] = Counter()
    for one in parts:
        finished.update(one.finished)
    histograms = {
        field.name: _sum([getattr(one, field.name) for one in parts])
        for field in fields(RequestStats)
        if isinstance(getattr(parts[0], field.name), HistogramData)
    }
    return RequestStats(
        **histograms,
        finished=dict(finished),
        num_unfinished=sum(one.num_unfinished for one in parts),
        num_within_slo=sum(one.num_within_slo for one in parts),
        num_judged=sum(one.num_judged for one in parts),
    )
