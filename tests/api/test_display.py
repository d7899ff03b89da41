"""What notebooks and IPython's prompt show of our objects."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from IPython.lib.pretty import pretty

from sdk import LLM, SamplingParams
from sdk.api.outputs import CompletionOutput, RequestOutput
from sdk.testing import FakeLLM

EVIL = '<script>alert(1)</script> & "quoted"'


class Reader(HTMLParser):
    """The texts of an HTML table; fails on tags that are not closed."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def html(value: Any) -> Reader:
    found = Reader(value._repr_html_())
    assert set(found.tags) <= {"table", "caption", "tr", "th", "td"}
    return found


def test_an_llm_says_what_it_is(llm: LLM, tiny_path: Path) -> None:
    assert repr(llm).startswith(f"LLM({str(tiny_path)!r}, llama of 2 layers, cpu, 128 tokens, ")
    shown = html(llm).text
    assert "2 layers" in shown and "128 tokens" in shown and "MiB" in shown
    llm.close()
    assert "this LLM was closed" in repr(llm) and "this LLM was closed" in html(llm).text
    assert repr(LLM.__new__(LLM)).startswith("<sdk.llm.LLM object at")
    with FakeLLM() as fake:
        assert repr(fake) == "FakeLLM(max_model_len=4096, 0 requests)"


def test_an_explanation_reads_as_it_is_printed(llm: LLM) -> None:
    found = llm.explain()
    assert isinstance(found, str) and repr(found) == str(found) == pretty(found)
    assert found.startswith("model      ") and "\n" in found
    shown = html(found)
    for name in ("model", "device", "memory", "linear layers", "other operators"):
        assert shown.texts.count(name) == 1
    words = {word for text in shown.texts for word in text.split()}
    assert words >= set(str(found).split()) - {"memory"}


def test_a_plan_and_a_report_are_tables(llm: LLM) -> None:
    plan, report = llm.memory_plan, llm.quant_report()
    assert pretty(plan) == str(plan) and pretty(report) == str(report)
    for line in str(plan).splitlines():
        for word in line.split():
            assert word in html(plan).text
    for layer in report.layers:
        assert layer.format in html(report).text and layer.kernel in html(report).text


def test_a_plan_that_does_not_fit_says_why(smollm2: Path) -> None:
    plan = LLM.plan(smollm2, memory="140MiB", max_model_len=8192)
    assert not plan.fits and plan.alternatives
    for shown in (html(plan).text, pretty(plan)):
        assert plan.problem.splitlines()[0] in shown
    assert str(plan.alternatives[0]) in html(plan).text


def test_outputs_are_short_and_escaped() -> None:
    with FakeLLM(EVIL) as llm:
        outputs = llm.generate([f"{EVIL} prompt", "b " * 400], SamplingParams(max_tokens=99))
    line = pretty(outputs[0])
    assert line.startswith("RequestOutput('#0', prompt=") and "finish_reason='stop'" in line
    assert pretty(outputs).count("CompletionOutput(") == 2 and len(pretty(outputs[1])) < 300
    shown = html(outputs[0])
    assert f"{EVIL} prompt" in shown.text and "stop" in shown.text
    assert "<script" not in outputs[0]._repr_html_()


def test_token_prompts_and_several_answers() -> None:
    answers = [CompletionOutput(i, f"text {i}", [1, 2], finish_reason="length") for i in (0, 1)]
    output = RequestOutput("7", None, [1, 2, 3], None, answers, True)
    assert "3 token ids" in html(output).text and "text 1" in html(output).text
    assert pretty(output).count("CompletionOutput(") == 2


def test_a_vector_is_not_a_wall_of_numbers(tiny: LLM) -> None:
    [output] = tiny.embed("the cat")
    assert len(pretty(output)) < 120 and f"({len(output.embedding)} numbers)" in pretty(output)


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_names_of_files_are_escaped(stop: int, tiny_path: Path, tmp_path: Path) -> None:
    place = tmp_path / ["a&b.gguf", "a<b>.gguf", 'a"b".gguf'][stop]
    place.symlink_to(tiny_path)
    with LLM(place, max_model_len=64) as llm:
        assert place.name in html(llm).text and place.name in html(llm.explain()).text
