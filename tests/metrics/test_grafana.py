"""The dashboard of docs/grafana: every metric it asks for exists, and every metric is in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from sdk import SamplingParams
from sdk.metrics.prometheus import collector, names
from sdk.testing import FakeLLM

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "embedlm.json"


@pytest.fixture(scope="module")
def dashboard():
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def expressions(dashboard):
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]


@pytest.fixture(scope="module")
def scrape():
    """{sample name: the labels it has} of an engine with tenants, an adapter and an SLO."""
    registry = CollectorRegistry()
    with FakeLLM("one two three") as llm:
        registry.register(collector(llm))
        llm.set_slo("e2e=100")
        llm.generate(["a", "b"], SamplingParams(tenant="acme", n=2), use_tqdm=False)
        recorder = llm._driver.engine.scheduler.recorder
        recorder.by_adapter["style"] = recorder.by_tenant["acme"]  # no fake can load one
        text = generate_latest(registry).decode()
    found: dict[str, set[str]] = {}
    for line in text.splitlines():
        if match := re.match(r"(?:# TYPE )?(embedlm:\w+)(?:\{(.*?)\})?", line):
            labels = re.findall(r'(\w+)="', match[2] or "")
            found.setdefault(match[1], set()).update(labels)
    return found


def test_every_metric_that_is_queried_exists_with_the_labels_it_is_grouped_by(dashboard, scrape):
    for expression in expressions(dashboard):
        asked = re.findall(r"embedlm:\w+", expression)
        assert asked and set(asked) <= scrape.keys(), expression
        grouped = {
            label.strip()
            for labels in re.findall(r"by \((.*?)\)", expression)
            for label in labels.split(",")
        }
        for name in asked:
            # only pools with tiers count pages by bits, and experts in a file are not everywhere
            assert grouped <= scrape[name] | {"bits", "result", "model_name"}, expression


def test_every_metric_is_on_a_panel(dashboard):
    queried = " ".join(expressions(dashboard))
    missing = [
        name for name in names() if not re.search(rf"{name}(_bucket|_sum|_count)?\{{", queried)
    ]
    assert missing == []


def test_queries_are_balanced_and_legends_name_labels_that_are_kept(dashboard):
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            expression, legend = target["expr"], target["legendFormat"]
            for opening, closing in ("()", "{}", "[]"):
                assert expression.count(opening) == expression.count(closing), expression
            for label in re.findall(r"\{\{(\w+)\}\}", legend):
                kept = re.search(rf"by \([^)]*\b{label}\b", expression)
                assert kept or not re.search(r"\bsum\b", expression), (legend, expression)


def test_panels_have_their_own_ids_and_places_and_a_description(dashboard):
    panels = dashboard["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + i, place["y"] + j) for i in range(place["w"]) for j in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["description"] and panel["targets"]
            assert panel["datasource"]["uid"] == "${datasource}"
