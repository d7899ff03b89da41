"""What Prometheus scrapes: names, types, labels and values."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from sdk import AsyncLLM, EngineDeadError, RequestError, SamplingParams
from sdk.metrics.prometheus import collector, names
from sdk.testing import FakeLLM, ManualClock

#: What the dashboards of vLLM's repository query (examples/observability, vLLM 0.19).
OF_VLLMS_DASHBOARDS = {
    *("vllm:e2e_request_latency_seconds", "vllm:prompt_tokens", "vllm:generation_tokens"),
    *("vllm:inter_token_latency_seconds", "vllm:num_requests_running"),
    *("vllm:num_requests_waiting", "vllm:time_to_first_token_seconds"),
    *("vllm:kv_cache_usage_perc", "vllm:request_prompt_tokens"),
    *("vllm:request_generation_tokens", "vllm:request_success"),
    *("vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds"),
    *("vllm:request_decode_time_seconds", "vllm:request_max_num_generation_tokens"),
}


@pytest.fixture
def llm():
    clock = ManualClock(1.0)
    times = {"seconds_per_token": 0.25, "seconds_to_first_token": 0.5}
    with FakeLLM("one two three", clock=clock, sleep=clock.sleep, **times) as made:
        yield made


def scraped(llms, **options):
    """{name: family} and {(name, labels): value} of what a scrape says."""
    registry = CollectorRegistry()
    registry.register(collector(llms, **options))
    text = generate_latest(registry).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    return families, values


FAKE = ("model_name", "fake")


def test_values_are_those_of_the_engine(llm):
    llm.set_slo("ttft=0.75,e2e=1.25")
    llm.generate(["a b", "c"], SamplingParams(max_tokens=3, tenant="acme"), use_tqdm=False)
    families, values = scraped(llm)
    assert values["embedlm:engine_up", FAKE] == 1
    assert values["embedlm:prompt_tokens_total", FAKE] == 3
    assert values["embedlm:generation_tokens_total", FAKE] == 6
    assert values["embedlm:request_success_total", ("finished_reason", "length"), FAKE] == 2
    assert values["embedlm:request_success_total", ("finished_reason", "error"), FAKE] == 0
    assert values["embedlm:time_to_first_token_seconds_count", FAKE] == 2
    assert values["embedlm:time_to_first_token_seconds_sum", FAKE] == 1.5
    below = {
        float(dict(key[1:])["le"]): value
        for key, value in values.items()
        if key[0] == "embedlm:time_to_first_token_seconds_bucket"
    }
    assert (below[0.5], below[0.75], below[1.0], below[math.inf]) == (0, 2, 2, 2)
    assert values["embedlm:inter_token_latency_seconds_sum", FAKE] == 4 * 0.25
    assert values["embedlm:e2e_request_latency_seconds_sum", FAKE] == 2.5
    assert values["embedlm:request_max_num_generation_tokens_sum", FAKE] == 6
    assert values["embedlm:slo_requests_good_total", FAKE] == 2
    assert values["embedlm:steps_total", FAKE] == 3
    assert values["embedlm:step_part_seconds_total", FAKE, ("part", "execute")] == 1.25
    assert values["embedlm:kv_cache_pages", FAKE, ("state", "total")] > 0
    acme = ("tenant", "acme")
    assert values["embedlm:tenant_generation_tokens_total", FAKE, acme] == 6
    assert values["embedlm:tenant_time_to_first_token_seconds_sum", FAKE, acme] == 1.5
    assert families["embedlm:kv_cache_usage_perc"].type == "gauge"
    assert families["embedlm:request_success"].type == "counter"
    assert families["embedlm:iteration_tokens_total"].type == "histogram"
    assert all(family.documentation.endswith(".") for family in families.values())


def test_buckets_grow_and_end_with_all(llm):
    llm.generate(["a b", "c"], use_tqdm=False)
    families, _ = scraped(llm)
    histograms = [family for family in families.values() if family.type == "histogram"]
    assert len(histograms) > 10
    for family in histograms:
        buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
        counts = [sample.value for sample in buckets]
        assert counts == sorted(counts)
        if buckets:
            assert buckets[-1].labels["le"] == "+Inf"


def test_with_vllms_prefix_its_dashboards_find_everything(llm):
    llm.generate("a", use_tqdm=False)
    families, _ = scraped(llm, prefix="vllm")
    assert families.keys() >= OF_VLLMS_DASHBOARDS


def test_several_models_and_labels(llm):
    with FakeLLM("x") as other:
        other.generate("a", use_tqdm=False)
        both = {"big": llm, "small": AsyncLLM(other).llm}
        _, values = scraped(both, labels={"host": "h1"})
    host = ("host", "h1")
    name = "embedlm:generation_tokens_total"
    assert values[name, host, ("model_name", "small")] == 2
    assert values[name, host, ("model_name", "big")] == 0


def test_a_closed_or_dead_engine_is_down_and_the_others_are_not(llm):
    closed = FakeLLM()
    closed.close()
    dead = FakeLLM(errors={0: EngineDeadError("lost")})
    with pytest.raises(EngineDeadError):
        dead.generate("a", use_tqdm=False)
    _, values = scraped({"closed": closed, "dead": dead, "open": llm})
    up = {key[1][1]: value for key, value in values.items() if key[0] == "embedlm:engine_up"}
    assert up == {"closed": 0, "dead": 0, "open": 1}
    assert not any(("model_name", "closed") in key for key in values if "engine_up" not in key[0])


def test_a_sleeping_engine_is_up(llm):
    llm.sleep()
    assert scraped(llm)[1]["embedlm:engine_up", FAKE] == 1


def test_tokens_taken_back_do_not_lower_a_counter(llm):
    """A stop string ends an answer before the tokens that were already counted."""
    made = collector(llm)
    registry = CollectorRegistry()
    registry.register(made)
    llm.generate("a", use_tqdm=False)
    name, labels = "embedlm:generation_tokens_total", {"model_name": "fake"}
    before = registry.get_sample_value(name, labels)
    llm._driver.engine.scheduler.committer.num_generation_tokens -= 2
    assert registry.get_sample_value(name, labels) == before


def test_two_collectors_of_one_name_do_not_fit_into_a_registry(llm):
    registry = CollectorRegistry()
    registry.register(collector(llm))
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(collector(llm))
    registry.register(collector(llm, prefix="vllm"))


def test_nothing_is_registered_by_itself(llm):
    before = set(REGISTRY._collector_to_names)
    collector(llm)
    assert set(REGISTRY._collector_to_names) == before


def test_a_scrape_during_a_step_does_not_wait():
    import threading

    inside, leave = threading.Event(), threading.Event()

    def sleep(_):
        inside.set()
        assert leave.wait(60)

    with FakeLLM("one", sleep=sleep, seconds_per_token=1.0) as llm:
        stream = llm.stream("a")
        assert inside.wait(60)
        _, values = scraped(llm)
        leave.set()
        assert values["embedlm:num_requests_running", FAKE] == 1
        list(stream)


@pytest.mark.parametrize(
    ("llms", "options", "message"),
    [
        (5, {}, "expected an LLM or a dict of LLMs, found 5"),
        ({"a": 5}, {}, "found 'a': 5"),
        (None, {"prefix": "vllm:"}, "prefix: expected letters, digits and underscores"),
        (None, {"labels": {"tenant": "x"}}, "labels: expected names .* found 'tenant'"),
        (None, {"labels": {"a-b": "x"}}, "found 'a-b'"),
        (None, {"labels": {"host": 1}}, "labels: host: expected text, found 1"),
    ],
)
def test_bad_arguments_are_named(llm, llms, options, message):
    with pytest.raises(RequestError, match=message):
        collector(llm if llms is None else llms, **options)


def test_every_name_is_documented(documented):
    missing = [name for name in names() if name.partition(":")[2] not in documented]
    groups = ("tenant_", "adapter_")
    assert [name for name in missing if not name.partition(":")[2].startswith(groups)] == []


def test_the_sdk_imports_no_client_by_itself():
    code = (
        "import sys; from sdk.testing import FakeLLM; llm = FakeLLM();"
        "llm.generate('a', use_tqdm=False); llm.stats(); llm.list_requests();"
        "bad = [m for m in sys.modules if m.startswith(('prometheus', 'opentelemetry'))];"
        "assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("sdk.metrics.prometheus", "prometheus_client"),
        ("sdk.requests.driving.opentelemetry", "opentelemetry"),
    ],
)
def test_without_the_package_the_error_says_what_to_install(module, package):
    code = (
        f"import sys; sys.modules['{package}'] = None\n"
        "try:\n"
        f"    import {module}\n"
        "except ImportError as error:\n"
        "    assert 'pip install \"embedlm[metrics]\"' in str(error), error\n"
        "else:\n"
        "    raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
