"""Numbers for Prometheus, through the package ``prometheus-client`` (extra ``metrics``).

Nothing is registered by itself: :func:`collector` returns an object for the host's registry. A
scrape reads what the engines have counted; it neither waits for steps nor holds them up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from typing import Any, Protocol, cast

from sdk.api.errors import EngineClosedError, EngineDeadError, RequestError
from sdk.kernels.packages import missing
from sdk.metrics.histogram import (
    REQUEST_TIME_BOUNDS,
    TOKEN_BOUNDS,
    TOKEN_TIME_BOUNDS,
    TTFT_BOUNDS,
    HistogramData,
)
from sdk.metrics.stats import EngineStats, RequestStats

try:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector
except ImportError as error:
    raise missing(error, "sdk.metrics.prometheus needs") from error

_PREFIX = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
#: Labels of single metrics, which ``labels`` must not repeat.
_OWN_LABELS = ("model_name", "finished_reason", "part", "state", "bits", "tenant", "adapter", "le")


class HasStats(Protocol):
    """An :class:`sdk.LLM`, or an object with the same method."""

    def stats(self) -> EngineStats:
        """See :meth:`sdk.LLM.stats`."""


def collector(
    llms: HasStats | Mapping[str, HasStats],
    *,
    labels: Mapping[str, str] | None = None,
    prefix: str = "embedlm",
) -> EngineCollector:
    """A collector of the metrics of ``llms``: ``registry.register(collector(llm))``.

    ``llms``: an ``LLM``, or several by name. The name is the value of the label ``model_name``; of
    a single ``LLM`` it is the model it was loaded from. ``labels``: more labels for every metric.
    ``prefix``: names are ``prefix:name``. With ``prefix="vllm"`` they are those of vLLM, for
    dashboards that were made for it.

    :raises RequestError: an argument has a bad value; the message names it.
    """
    if not isinstance(llms, Mapping):
        llms = {_model_of(llms): llms}
    for name, llm in llms.items():
        if not isinstance(name, str) or not callable(getattr(llm, "stats", None)):
            raise RequestError(
                "collector: expected an LLM, or a dict of names to LLMs; found "
                f"{name!r:.80}: {llm!r:.80}"
            )
    if not isinstance(prefix, str) or not _PREFIX.fullmatch(prefix):
        raise RequestError(
            f"collector: prefix: expected letters, digits and underscores, found {prefix!r:.80}"
        )
    labels = dict(labels or {})
    for key, value in labels.items():
        if not isinstance(key, str) or not _LABEL.fullmatch(key) or key in _OWN_LABELS:
            raise RequestError(
                "collector: labels: expected names of letters, digits and underscores other than "
                f"{', '.join(_OWN_LABELS)}; found {key!r:.80}"
            )
        if not isinstance(value, str):
            raise RequestError(f"collector: labels: {key}: expected text, found {value!r:.80}")
    return EngineCollector(dict(llms), labels, prefix)


def _model_of(llm: Any) -> str:
    if not callable(getattr(llm, "stats", None)):
        raise RequestError(f"collector: expected an LLM or a dict of LLMs, found {llm!r:.80}")
    return str(getattr(getattr(llm, "config", None), "model", "model"))


class EngineCollector(Collector):
    """See :func:`collector`. A closed engine only has ``engine_up`` 0."""

    def __init__(
        self, llms: Mapping[str, HasStats], labels: Mapping[str, str], prefix: str
    ) -> None:
        self._llms = llms
        self._labels = labels
        self._prefix = prefix
        #: Generated tokens by model: answers may take some back (stop strings, banned strings), but
        #: a counter must not fall.
        self._most: dict[str, float] = {}

    def describe(self) -> Iterable[Metric]:
        """The metrics without values: the registry checks that no other one has their names."""
        return _Families(self._prefix, self._labels, self._most).all()

    def collect(self) -> Iterable[Metric]:
        """All metrics now."""
        families = _Families(self._prefix, self._labels, self._most)
        for name, llm in self._llms.items():
            try:
                stats = llm.stats()
            except (EngineClosedError, EngineDeadError):
                families.gauge("engine_up", name, 0)
                continue
            families.gauge("engine_up", name, 1)
            families.add(name, stats)
        return families.all()


#: (name, help, its labels)
_GAUGES = (
    ("engine_up", "1 while the engine accepts requests, 0 after it was closed or has failed.", ()),
    ("num_requests_running", "Answers that hold KV pages.", ()),
    ("num_requests_waiting", "Answers that wait, preempted ones included.", ()),
    ("kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1.", ()),
    ("kv_cache_pages", "KV pages by state: used, cached (of these pinned), total.", ("state",)),
    ("kv_cache_pages_by_bits", "Used and cached KV pages by the bits of their type.", ("bits",)),
    ("swap_pages", "Slots of the swap space: used, total.", ("state",)),
)
_COUNTERS = (
    ("num_preemptions", "Preemptions.", ()),
    ("prompt_tokens", "Prompt tokens of requests that have their first token.", ()),
    ("computed_prompt_tokens", "Prompt tokens computed: without prefix hits, again if lost.", ()),
    ("generation_tokens", "Tokens generated.", ()),
    ("request_success", "Answers that have ended.", ("finished_reason",)),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", ()),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", ()),
    ("spec_decode_num_draft_tokens", "Draft tokens verified.", ()),
    ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", ()),
    ("slo_requests_judged", "Answers that ended while there was an SLO.", ()),
    ("slo_requests_good", "Of these, answers that kept all its limits.", ()),
    ("rewinds", "Banned strings that answers took back.", ()),
    ("swapped_out_pages", "KV pages copied to the swap space.", ()),
    ("swapped_in_pages", "KV pages copied back from the swap space.", ()),
    ("lowered_pages", "KV pages moved to a lower tier.", ()),
    ("expert_matrices", "Experts that products needed: hit, guess, miss.", ("result",)),
    ("expert_read_bytes", "Bytes of experts read.", ()),
    ("expert_wait_seconds", "Seconds in which threads waited for experts.", ()),
    ("steps", "Steps.", ()),
    (
        "step_part_seconds",
        "Seconds in the parts of steps: plan, execute, commit, output.",
        ("part",),
    ),
    ("native_seconds", "Seconds inside native calls, a part of execute.", ()),
)
_OF_GROUPS = (
    ("request_success", "Answers that have ended.", ("finished_reason",)),
    ("prompt_tokens", "Prompt tokens of answers that have ended.", ()),
    ("generation_tokens", "Tokens of answers that have ended.", ()),
    ("slo_requests_judged", "Answers that ended while there was an SLO.", ()),
    ("slo_requests_good", "Of these, answers that kept all its limits.", ()),
)
#: (name, help, field, buckets)
_OF_REQUESTS = (
    ("time_to_first_token_seconds", "From arrival to the first token.", "ttft", TTFT_BOUNDS),
    (
        *("request_time_per_output_token_seconds", "Mean time per token after the first."),
        *("tpot", TOKEN_TIME_BOUNDS),
    ),
    ("e2e_request_latency_seconds", "From arrival to the end.", "e2e", REQUEST_TIME_BOUNDS),
    (
        *("request_queue_time_seconds", "From the queue to the first step."),
        *("queue_time", REQUEST_TIME_BOUNDS),
    ),
    (
        *("request_prefill_time_seconds", "From the first step to the first token."),
        *("prefill_time", REQUEST_TIME_BOUNDS),
    ),
    (
        *("request_decode_time_seconds", "From the first token to the last."),
        *("decode_time", REQUEST_TIME_BOUNDS),
    ),
    (
        *("request_inference_time_seconds", "From the first step to the last token."),
        *("inference_time", REQUEST_TIME_BOUNDS),
    ),
    ("request_prompt_tokens", "Prompt tokens of each answer.", "prompt_tokens", TOKEN_BOUNDS),
    ("request_generation_tokens", "Tokens of each answer.", "generation_tokens", TOKEN_BOUNDS),
)
#: Of these, tenants and adapters have their own.
_HISTOGRAMS_OF_GROUPS = _OF_REQUESTS[:4]
_OF_STEPS = (
    (
        *("inter_token_latency_seconds", "Between two steps that gave an answer tokens."),
        *("inter_token_latency", TOKEN_TIME_BOUNDS),
    ),
    ("step_seconds", "Each step.", "step_seconds", TOKEN_TIME_BOUNDS),
    ("iteration_tokens_total", "Tokens of each step.", "step_tokens", TOKEN_BOUNDS),
    (
        *("request_max_num_generation_tokens", "Tokens of the longest answer of each request."),
        *("longest_answer", TOKEN_BOUNDS),
    ),
)
_GROUPS = ("tenant", "adapter")


class _Families:
    """The metrics of one scrape."""

    def __init__(self, prefix: str, labels: Mapping[str, str], most: dict[str, float]) -> None:
        self._prefix = prefix
        self._labels = labels
        self._most = most
        self._found: dict[str, Metric] = {}
        for name, text, own in _GAUGES:
            self._make(GaugeMetricFamily, name, text, own)
        for name, text, own in _COUNTERS:
            self._make(CounterMetricFamily, name, text, own)
        for name, text, _, _ in (*_OF_REQUESTS, *_OF_STEPS):
            self._make(HistogramMetricFamily, name, text)
        for group in _GROUPS:
            for name, text, own in _OF_GROUPS:
                self._make(CounterMetricFamily, f"{group}_{name}", text, (group, *own))
            for name, text, _, _ in _HISTOGRAMS_OF_GROUPS:
                self._make(HistogramMetricFamily, f"{group}_{name}", text, (group,))

    def _make(self, kind: Any, name: str, text: str, own: tuple[str, ...] = ()) -> None:
        labels = ["model_name", *own, *self._labels]
        self._found[name] = kind(f"{self._prefix}:{name}", text, labels=labels)

    def all(self) -> list[Metric]:
        """Every metric, in a fixed order."""
        return list(self._found.values())

    def add(self, model: str, stats: EngineStats) -> None:
        """Add the values of an engine."""
        self._add_gauges(model, stats.metrics)
        self._add_counters(model, stats.metrics, stats.requests)
        for name, _, field, bounds in _OF_REQUESTS:
            self._histogram(name, model, getattr(stats.requests, field), bounds)
        for name, _, field, bounds in _OF_STEPS:
            self._histogram(name, model, getattr(stats, field), bounds)
        for group, found in (("tenant", stats.by_tenant), ("adapter", stats.by_adapter)):
            for label, requests in found.items():
                self._add_group(group, model, label, requests)

    def _add_gauges(self, model: str, metrics: Mapping[str, float]) -> None:
        self.gauge("num_requests_running", model, metrics["num_running"])
        self.gauge("num_requests_waiting", model, metrics["num_waiting"])
        self.gauge("kv_cache_usage_perc", model, metrics["kv_usage"])
        for state, name in (
            ("used", "num_pages_used"),
            ("cached", "num_pages_cached"),
            ("pinned", "num_pages_pinned"),
            ("total", "num_pages"),
        ):
            self.gauge("kv_cache_pages", model, metrics[name], state)
        for bits in ("16", "8", "4"):
            if (pages := metrics.get(f"num_pages_{bits}bit")) is not None:
                self.gauge("kv_cache_pages_by_bits", model, pages, bits)
        self.gauge("swap_pages", model, metrics["swap_pages_used"], "used")
        self.gauge("swap_pages", model, metrics["swap_pages"], "total")

    def _add_counters(
        self, model: str, metrics: Mapping[str, float], requests: RequestStats
    ) -> None:
        for name, source in (
            ("num_preemptions", "num_preemptions"),
            ("prompt_tokens", "num_prompt_tokens_begun"),
            ("computed_prompt_tokens", "num_prompt_tokens"),
            ("prefix_cache_queries", "num_prompt_tokens_queried"),
            ("prefix_cache_hits", "num_prompt_tokens_cached"),
            ("spec_decode_num_draft_tokens", "num_draft_tokens"),
            ("spec_decode_num_accepted_tokens", "num_accepted_tokens"),
            ("rewinds", "num_rewinds"),
            ("swapped_out_pages", "swapped_out"),
            ("swapped_in_pages", "swapped_in"),
            ("steps", "num_steps"),
            ("native_seconds", "native_seconds"),
        ):
            self._counter(name, model, metrics[source])
        most = self._most[model] = max(metrics["num_generation_tokens"], self._most.get(model, 0))
        self._counter("generation_tokens", model, most)
        self._counter("lowered_pages", model, metrics.get("num_pages_lowered", 0))
        if "expert_hits" in metrics:
            for result, source in (("hit", "hits"), ("guess", "guesses"), ("miss", "misses")):
                self._counter("expert_matrices", model, metrics[f"expert_{source}"], result)
            for name in ("expert_read_bytes", "expert_wait_seconds"):
                self._counter(name, model, metrics[name])
        for part in ("plan", "execute", "commit", "output"):
            self._counter("step_part_seconds", model, metrics[f"{part}_seconds"], part)
        for reason, count in requests.finished.items():
            self._counter("request_success", model, count, reason)
        self._counter("slo_requests_judged", model, requests.num_judged)
        self._counter("slo_requests_good", model, requests.num_within_slo)

    def _add_group(self, group: str, model: str, label: str, requests: RequestStats) -> None:
        for reason, count in requests.finished.items():
            self._counter(f"{group}_request_success", model, count, label, reason)
        for name, value in (
            ("prompt_tokens", requests.prompt_tokens.sum),
            ("generation_tokens", requests.generation_tokens.sum),
            ("slo_requests_judged", requests.num_judged),
            ("slo_requests_good", requests.num_within_slo),
        ):
            self._counter(f"{group}_{name}", model, value, label)
        for name, _, field, bounds in _HISTOGRAMS_OF_GROUPS:
            self._histogram(f"{group}_{name}", model, getattr(requests, field), bounds, label)

    def gauge(self, name: str, model: str, value: float, *own: str) -> None:
        """Add a value of a gauge; ``own``: the values of its own labels."""
        cast(GaugeMetricFamily, self._found[name]).add_metric(self._values(model, own), value)

    def _counter(self, name: str, model: str, value: float, *own: str) -> None:
        cast(CounterMetricFamily, self._found[name]).add_metric(self._values(model, own), value)

    def _histogram(
        self, name: str, model: str, data: HistogramData, bounds: Iterable[float], *own: str
    ) -> None:
        counts = data.cumulative(tuple(bounds))
        buckets = [("+Inf" if bound == inf else repr(bound), n) for bound, n in counts]
        family = cast(HistogramMetricFamily, self._found[name])
        family.add_metric(self._values(model, own), buckets, sum_value=data.sum)

    def _values(self, model: str, own: tuple[str, ...]) -> list[str]:
        return [model, *own, *self._labels.values()]


def names(prefix: str = "embedlm") -> Iterator[str]:
    """The names of all metrics, as Prometheus shows them."""
    for family in _Families(prefix, {}, {}).all():
        yield family.name + ("_total" if family.type == "counter" else "")
