"""Conversations in a real browser: asking, stopping, changing, and what is kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from sdk import LLM, SamplingParams
from sdk.testing import FakeAnswer, FakeLLM
from tests.serving.page.conftest import Pace, Served, Visitor, wait_until

Serve = Callable[..., Served]
Visit = Callable[..., Visitor]

LONG = " ".join(f"word{i}" for i in range(3500))
ANSWER = "Blue light is **scattered** more.\n\n- one\n- two\n\n```python\nprint(1)\n```\n"


def test_an_answer_is_streamed_and_kept_over_a_reload(serve: Serve, visit: Visit) -> None:
    pace = Pace()
    llm = FakeLLM(ANSWER, seconds_per_token=0.01, sleep=pace)
    served = serve({"tiny": llm})
    visitor = visit(served.address)
    page = visitor.page
    visitor.ask("Why is the sky blue?")
    answer = page.get_by_role("article", name="Answer of tiny")
    pace.allow(3)
    expect(answer).to_contain_text("Blue light")
    assert answer.get_attribute("aria-busy") == "true"
    expect(page.get_by_role("button", name="Send", exact=True)).to_be_hidden()
    pace.allow(3)
    page.wait_for_timeout(100)  # a moment between two tokens: else there is no speed
    pace.go()
    visitor.ended()
    expect(answer.locator("strong")).to_have_text("scattered")
    expect(answer.locator("li")).to_have_text(["one", "two"])
    expect(answer.get_by_role("region", name="Code, python")).to_have_text("print(1)")
    expect(answer.locator(".stats")).to_contain_text("tokens/s")
    expect(answer.locator(".stats")).to_contain_text("prompt")
    page.get_by_label("Message", exact=True).fill("a draft")
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_have_value("a draft")
    expect(page.get_by_role("article", name="You")).to_contain_text("Why is the sky blue?")
    expect(answer.locator("strong")).to_have_text("scattered")
    # what was said before is sent with the next question
    visitor.ask("And red?")
    wait_until(lambda: len(llm.requests) == 2)
    assert [one["role"] for one in llm.requests[1].prompt] == ["user", "assistant", "user"]
    assert llm.requests[1].prompt[1]["content"] == ANSWER


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "way", ["button", "escape", "leave", pytest.param("delete", marks=pytest.mark.slow)]
)
def test_an_answer_that_nobody_wants_ends_on_the_server(
    serve: Serve, visit: Visit, way: str
) -> None:
    llm = FakeLLM(LONG, seconds_per_token=0.02)  # more than a minute
    visitor = visit(serve({"tiny": llm}).address)
    page = visitor.page
    visitor.ask("Count")
    answer = page.get_by_role("article", name="Answer of tiny")
    expect(answer).to_contain_text("word3")
    assert llm.get_metrics()["num_running"] == 1
    if way == "button":
        page.get_by_role("button", name="Stop").click()
    elif way == "escape":
        page.keyboard.press("Escape")
    elif way == "delete":
        page.get_by_role("button", name="Delete “Count”").click()
    else:
        page.goto("about:blank")
    wait_until(lambda: llm.get_metrics()["num_running"] == 0)
    assert llm.get_metrics()["num_generation_tokens"] < 3500
    if way in ("button", "escape"):
        expect(answer.locator(".note")).to_have_text("Stopped.")
        expect(page.get_by_label("Message", exact=True)).to_be_focused()
    if way == "leave":
        page.go_back()
        expect(answer.locator(".note")).to_contain_text("The page was closed")
        expect(answer).to_contain_text("word3")


def test_answers_are_regenerated_and_messages_edited_and_both_can_be_undone(
    serve: Serve, visit: Visit
) -> None:
    llm = FakeLLM(["first", "second", "third"])
    visitor = visit(serve({"tiny": llm}).address)
    page = visitor.page
    answer = page.get_by_role("article", name="Answer of tiny")
    visitor.ask("Hello")
    expect(answer).to_contain_text("first")
    page.get_by_role("button", name="Regenerate").click()
    expect(answer).to_contain_text("second")
    page.get_by_role("button", name="Undo").click()
    expect(answer).to_contain_text("first")
    page.get_by_role("button", name="Edit").click()
    edit = page.get_by_label("Edit your message")
    expect(edit).to_be_focused()
    edit.fill("Goodbye")
    page.get_by_role("button", name="Save and ask").click()
    expect(answer).to_contain_text("third")
    assert [one.prompt for one in llm.requests] == [
        [{"role": "user", "content": text}] for text in ("Hello", "Hello", "Goodbye")
    ]
    page.get_by_role("button", name="Undo").click()
    expect(page.get_by_role("article", name="You")).to_contain_text("Hello")
    expect(answer).to_contain_text("first")


@pytest.mark.slow
def test_conversations_are_kept_deleted_and_brought_back(serve: Serve, visit: Visit) -> None:
    visitor = visit(serve({"tiny": FakeLLM(lambda asked: f"About {asked[-1]['content']}")}).address)
    page = visitor.page
    titles = page.locator(".conversations .title")
    for text in ("apples", "pears"):
        page.get_by_role("button", name="New conversation").first.click()
        visitor.ask(text)
        expect(page.locator(".message").get_by_text(f"About {text}")).to_be_visible()
    expect(titles).to_have_text(["pears", "apples"])
    page.get_by_role("button", name="apples", exact=True).click()
    expect(page.locator(".message").get_by_text("About apples")).to_be_visible()
    page.get_by_role("button", name="Delete “apples”").click()
    expect(titles).to_have_text(["pears"])
    page.get_by_role("button", name="Undo").click()
    expect(titles).to_have_text(["pears", "apples"])
    # another tab knows them, and what is deleted there is deleted here
    other = visitor.tab()
    other.goto(page.url)
    other.get_by_role("button", name="Delete all").click()
    expect(other.locator(".conversations .title")).to_have_count(0)
    expect(titles).to_have_count(0)
    stored = page.evaluate("Object.keys(localStorage).filter((x) => x.includes('conversation'))")
    assert stored == []


def test_settings_are_sent_checked_and_kept(serve: Serve, visit: Visit) -> None:
    llm = FakeLLM("fine")
    visitor = visit(serve({"tiny": llm}).address)
    page = visitor.page
    page.get_by_role("button", name="Settings").click()
    for label, value in (
        ("Temperature", "0.5"),
        ("Top p", "0.9"),
        ("Top k", "20"),
        ("Max tokens", "7"),
        ("Seed", "3"),
        ("Stop strings", "END\n\\n\\n"),
        ("System prompt", "Be brief."),
    ):
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("Top p", exact=True).fill("2")
    expect(page.get_by_text("Expected a number from 0 to 1.")).to_be_visible()
    visitor.ask("Hello")
    expect(page.get_by_text("Correct the settings that are marked.")).to_be_visible()
    expect(page.get_by_label("Top p", exact=True)).to_be_focused()
    assert llm.requests == []
    page.get_by_label("Top p", exact=True).fill("0.9")
    page.get_by_role("button", name="Send", exact=True).click()
    wait_until(lambda: llm.requests)
    [request] = llm.requests
    params = request.sampling_params
    assert (params.temperature, params.top_p, params.top_k) == (0.5, 0.9, 20)
    assert (params.max_tokens, params.seed, params.stop) == (7, 3, ("END", "\n\n"))
    assert request.prompt[0] == {"role": "system", "content": "Be brief."}
    page.reload()
    page.get_by_role("button", name="Settings").click()
    temperature = page.get_by_label("Temperature", exact=True)
    expect(temperature).to_have_value("0.5")
    page.get_by_role("button", name="Back to defaults").click()
    expect(temperature).to_have_value("")
    page.get_by_role("button", name="Undo").click()
    expect(temperature).to_have_value("0.5")


def test_a_structured_answer_is_indented_and_checked_while_it_is_written(
    serve: Serve, visit: Visit
) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    good, bad = '{"name": "Ada Lovelace", "age": 36}', '{"name": "Ada", "age": -1}'
    pace = Pace()
    llm = FakeLLM([good, bad], seconds_per_token=0.01, sleep=pace)
    visitor = visit(serve({"tiny": llm}).address)
    page = visitor.page
    page.get_by_role("button", name="Settings").click()
    box = page.get_by_label("JSON schema", exact=True)
    box.fill("{")
    expect(page.get_by_text("This is not JSON")).to_be_visible()
    box.fill(json.dumps(schema))
    visitor.ask("Who?")
    state = page.locator(".state")
    pace.allow(3)
    expect(state).to_have_text("Valid so far")
    pace.go()
    expect(state).to_have_text("Valid: the answer follows the schema.")
    lines = page.get_by_role("region", name="JSON").inner_text()
    assert lines == '{\n  "name": "Ada Lovelace",\n  "age": 36\n}'
    structure = llm.requests[0].sampling_params.structured_outputs
    assert structure is not None and structure.json == schema
    page.get_by_role("button", name="Regenerate").click()
    expect(state).to_have_text("Not valid: /age: expected at least 0")


def test_calls_of_tools_are_shown_and_the_user_types_their_results(
    serve: Serve, visit: Visit
) -> None:
    calls = FakeAnswer(tool_calls=[("weather", {"city": "Paris"}), ("time", {"zone": "UTC"})])
    llm = FakeLLM([calls, "It is sunny."])
    visitor = visit(serve({"tiny": llm}).address)
    page = visitor.page
    page.get_by_role("button", name="Settings").click()
    tools = [{"name": "weather", "parameters": {"type": "object"}}, {"name": "time"}]
    page.get_by_label("Tool definitions").fill(json.dumps(tools))
    visitor.ask("What is it like?")
    expect(page.get_by_role("heading", name="Call of weather")).to_be_visible()
    expect(page.locator(".call code").first).to_have_text('{\n  "city": "Paris"\n}')
    page.get_by_label("Result of weather").fill("sunny")
    page.get_by_label("Result of time").fill("12:00")
    page.get_by_role("button", name="Send the results").click()
    expect(page.locator(".message").get_by_text("It is sunny.")).to_be_visible()
    [_, asked, *results] = llm.requests[1].prompt
    ids = [call["id"] for call in asked["tool_calls"]]
    assert [(one["role"], one["content"]) for one in results] == [
        ("tool", "sunny"),
        ("tool", "12:00"),
    ]
    assert [one["tool_call_id"] for one in results] == ids


@pytest.mark.slow
def test_reasoning_is_folded_above_the_answer(serve: Serve, visit: Visit) -> None:
    visitor = visit(serve({"tiny": FakeLLM()}).address)
    page = visitor.page
    deltas = [{"reasoning_content": "Hmm, "}, {"reasoning_content": "**let** me see."}]
    chunks = [{"choices": [{"delta": delta}]} for delta in [*deltas, {"content": "It is 4."}]]
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
    body = "".join([*lines, "data: [DONE]\n\n"])
    # models that reason are large: the server's part is tested in tests/serving
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, status=200))
    visitor.ask("2 + 2?")
    answer = page.get_by_role("article", name="Answer of tiny")
    expect(answer).to_contain_text("It is 4.")
    expect(answer.locator(".reasoning .markdown")).to_be_hidden()
    answer.get_by_text("Reasoning").click()
    expect(answer.locator(".reasoning strong")).to_have_text("let")
    assert answer.locator(".reasoning").inner_text().endswith("Hmm, let me see.")


@pytest.mark.slow
def test_a_real_model_answers_and_follows_a_schema(
    serve: Serve, visit: Visit, smollm2: Path
) -> None:
    schema = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}}
    schema |= {"required": ["city"], "additionalProperties": False}
    with LLM(str(smollm2), max_model_len=512) as llm:
        visitor = visit(serve(llm).address)
        page = visitor.page
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Temperature", exact=True).fill("0")
        page.get_by_label("Max tokens", exact=True).fill("40")
        visitor.ask("What is the capital of France?")
        visitor.ended()
        name = "Answer of SmolLM2-135M-Instruct.Q4_1"
        answer = page.get_by_role("article", name=name).first
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        [expected] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=40))
        assert stored_messages(page)[1]["content"] == expected.outputs[0].text
        expect(answer.locator(".stats")).to_contain_text("first after")
        page.get_by_label("JSON schema", exact=True).fill(json.dumps(schema))
        visitor.ask("The capital of France as JSON.")
        visitor.ended()
        expect(page.locator(".state")).to_have_text("Valid: the answer follows the schema.")


def stored_messages(page: Page) -> list[dict[str, Any]]:
    """The messages of the only conversation in the browser's storage."""
    [text] = page.evaluate(
        "Object.keys(localStorage).filter((x) => x.includes('conversation'))"
        ".map((x) => localStorage[x])"
    )
    found: list[dict[str, Any]] = json.loads(text)["messages"]
    return found
