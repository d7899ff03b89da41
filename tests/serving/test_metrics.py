"""/metrics over HTTP, and the weights of callers."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sdk import LLM
from sdk.serving import create_app
from sdk.serving.access import Caller, Open
from sdk.testing import FakeLLM, tiny_model
from tests.serving.serving import Serve, running


def test_a_scrape_has_every_model_and_counts_requests() -> None:
    with ExitStack() as stack:
        llms = {name: stack.enter_context(FakeLLM("Fine.")) for name in "ab"}
        client = stack.enter_context(running(create_app(llms)))
        assert client.post("/v1/completions", {"model": "b", "prompt": "Hi"}).status == 200
        found = client.get("/metrics")
    assert found.status == 200 and found.headers["content-type"].startswith("text/plain")
    families = {one.name: one for one in text_string_to_metric_families(found.body.decode())}
    counts = {"a": 0.0, "b": 0.0}
    for sample in families["embedlm:request_success"].samples:
        if sample.name.endswith("_total"):
            counts[sample.labels["model_name"]] += sample.value
    assert counts == {"a": 0.0, "b": 1.0}


def test_the_prefix_of_names_can_be_vllm_s(serve: Serve) -> None:
    client, _ = serve(app={"metrics_prefix": "vllm"})
    assert b"\nvllm:num_requests_running{" in client.get("/metrics").body


def test_without_prometheus_client_it_says_what_to_install(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    found = serve()[0].get("/metrics")
    assert found.status == 501 and "embedlm[metrics]" in found.error["message"]


def test_metrics_have_a_role_of_their_own(serve: Serve) -> None:
    user = Open(Caller(roles=frozenset({"user"})))
    found = serve(app={"access": user})[0].get("/metrics")
    assert found.status == 403 and found.error["code"] == "forbidden"


def test_the_weight_of_a_caller_is_that_of_its_tenant(tmp_path: Path) -> None:
    access = Open(Caller(tenant="gold", weight=4.0))
    body = {"prompt": "Hi", "max_tokens": 2}
    with ExitStack() as stack:
        llm = stack.enter_context(LLM(tiny_model(tmp_path / "model"), scheduling_policy="fair"))
        client = stack.enter_context(running(create_app(llm, access=access)))
        assert client.post("/v1/completions", body).status == 200
        policy = llm._driver.engine.scheduler.queues.policy
        assert policy.weight("gold") == 4.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["one", "two"]}),
        ("/v1/score", {"text_1": "one", "text_2": "two"}),
        ("/v1/rerank", {"query": "one", "documents": ["two"]}),
    ],
)
def test_requests_without_answers_belong_to_the_tenant_of_their_caller(
    serve: Serve, path: str, body: dict[str, Any]
) -> None:
    client, llm = serve(app={"access": Open(Caller(tenant="gold"))})
    assert client.post(path, body).status == 200
    assert {one.sampling_params.tenant for one in llm.requests} == {"gold"}
