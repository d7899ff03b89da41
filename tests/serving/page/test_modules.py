"""The page's own parsers, called in the browser: Markdown, unfinished JSON, schemas, events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser

from sdk.testing import FakeLLM
from tests.serving.page.conftest import Served

Call = Callable[..., Any]


@pytest.fixture(scope="module")
def call(browser: Browser) -> Iterator[Call]:
    """``call("markdown.js", "expression of m and x", x)``: what a module of the page returns."""
    served = Served({"tiny": FakeLLM()})
    context = browser.new_context()
    page = context.new_page()
    page.goto(served.address)

    def run(module: str, expression: str, value: Any = None) -> Any:
        code = (
            f"async (x) => {{ const m = await import('/page/js/{module}'); return {expression} }}"
        )
        return page.evaluate(code, value)

    yield run
    context.close()
    served.stop()


# ruff: noqa: E501  (tables of cases)
RENDERED = "(() => { const v = new m.MarkdownView(); v.update(x); return v.node.innerHTML; })()"


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a **b** _c_ ~~d~~ `e*f*`", "<p>a <strong>b</strong> <em>c</em> <del>d</del> <code>e*f*</code></p>"),
        ("***both*** and **a *b* c**", "<p><em><strong>both</strong></em> and <strong>a <em>b</em> c</strong></p>"),
        ("snake_case_name 2 * 3 * 4 a ** b", "<p>snake_case_name 2 * 3 * 4 a ** b</p>"),
        ("one\ntwo  \nthree\\\nfour", "<p>one\ntwo<br>three<br>four</p>"),
        ("# A #\n### B\n####### no", "<h4>A</h4><h6>B</h6><p>####### no</p>"),
        ("- a\n- b\n  - c\n\n  d\n- e", "<ul><li><p>a</p></li><li><p>b</p><ul><li>c</li></ul><p>d</p></li><li><p>e</p></li></ul>"),
        ("3. a\n4. b\n\nend", '<ol start="3"><li>a</li><li>b</li></ol><p>end</p>'),
        ("1. a\n   ```\n   x\n     y\n   ```\n2. b", None),
        ("> a\nb\n> > c", "<blockquote><p>a\nb</p><blockquote><p>c</p></blockquote></blockquote>"),
        ("---\ntext\n***", "<hr><p>text</p><hr>"),
        ("a | b\n--|:-:\n`x|y` | c\\|d", None),
        ("\\*a\\* \\\\ \\n", "<p>*a* \\ \\n</p>"),
        ("\\(a_1 * b_1 * c\\) and $$x_1 y_1$$", '<p><span class="math">\\(a_1 * b_1 * c\\)</span> and <span class="math">$$x_1 y_1$$</span></p>'),
        ("x<br>y <b>z</b> &amp;", "<p>x<br>y &lt;b&gt;z&lt;/b&gt; &amp;amp;</p>"),
        ("**open and `open", "<p>**open and `open</p>"),
        ("", ""),
    ],
)  # fmt: skip
def test_markdown(call: Call, text: str, html: str | None) -> None:
    found = call("markdown_view.js", RENDERED, text).replace(' dir="auto"', "")
    if html is not None:
        assert found == html
    elif "```" in text:
        assert found.startswith("<ol><li>a<div") and "<code>x\n  y</code>" in found
        assert found.endswith("</div></li><li>b</li></ol>")
    else:
        assert "<tr><th>a</th><th" in found and '<td class="align-center">c|d</td>' in found
        assert "<td><code>x|y</code></td>" in found


@pytest.mark.parametrize(
    ("text", "links"),
    [
        ("[a](https://a.example/x_y_z \"t\") https://b.example/c_(d).", ["https://a.example/x_y_z", "https://b.example/c_(d)"]),
        ("(see https://a.example/b) <https://c.example> <mailto:a@b.example>", ["https://a.example/b", "https://c.example/", "mailto:a@b.example"]),
        ("[a](javascript:alert(1)) [b](/v1/models) [c](data:x) [d](ftp://a.example) [e]()", []),
        ("[[a](https://a.example)](https://b.example) `https://c.example`", ["https://a.example/", "https://b.example/"]),
    ],
)  # fmt: skip
def test_links_of_markdown(call: Call, text: str, links: list[str]) -> None:
    hrefs = "[...(() => { const v = new m.MarkdownView(); v.update(x); return v.node; })()"
    found = call("markdown_view.js", f"{hrefs}.querySelectorAll('a')].map((a) => a.href)", text)
    if links and links[-1] == "https://b.example/":  # a link contains no link
        assert found[0] == links[0]
    else:
        assert found == links


def test_a_growing_text_is_rendered_as_the_whole_text_is(call: Call) -> None:
    text = (
        "# Title\n\nA paragraph\nof *two* lines.\n\n- one\n\n  still one\n- two\n\n    code?\n\n"
        "1. a\r\n2. b\r\n\r\n```py\nprint()\n\n# not a title\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
        "> quote\n\n- again\n\nThe end."
    )
    grown = """(() => {
      const v = new m.MarkdownView();
      const wrong = [];
      for (let n = 1; n <= x.length; n += 1) {
        v.update(x.slice(0, n));
        const whole = new m.MarkdownView();
        whole.update(x.slice(0, n));
        if (v.node.innerHTML !== whole.node.innerHTML) wrong.push(x.slice(0, n));
      }
      return [wrong, v.kept];
    })()"""
    wrong, kept = call("markdown_view.js", grown, text)
    assert wrong == []
    assert kept >= 5  # finished blocks are not made again


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize(
    "piece",
    [
        *("*a", "**a ", "_a_", "[", "![", "[a](", "](", "`", "``a`", "<", "> ", "- ", "1. "),
        *("|", "a|b\n", "\\(", "$$", "https://", "~~", "#", "***\n", "  - a\n", "\\", "![a](b) ["),
        *("*a _b ~~c [d ", "*a**b", "[a](<", "````", "```\n", "  \n", "|-|\n", ") [a]("),
    ],
)
def test_the_time_for_hostile_markdown_is_linear(call: Call, piece: str) -> None:
    # With quadratic time 200,000 characters take minutes, and the test its limit of time.
    size = call(
        "markdown.js", "JSON.stringify(m.blocks(x.repeat(Math.ceil(2e5 / x.length)))).length", piece
    )
    assert size > 0


def test_nothing_is_nested_without_end(call: Call) -> None:
    depth = """(() => {
      const deep = (one) => 1 + Math.max(0, ...[one.children, one.items, one.rows?.flat(2)]
        .flat().filter(Boolean).map(deep));
      return Math.max(...m.blocks(x).map(deep));
    })()"""
    for text in (
        "*a " * 500 + "b*" * 500,
        "> " * 500 + "a",
        "- " * 500 + "a",
        "[" * 500 + "](a)" * 500,
    ):
        assert call("markdown.js", depth, text) < 60


def test_unfinished_json_has_the_value_of_what_is_written(call: Call) -> None:
    value = {"a": [1, -2.5e3, {"b": 'x"\\\n\u00e9'}], "c": None, "d": True, "": {}}
    text = json.dumps(value)
    whole = call("json_text.js", "m.partial(x).value", text)
    assert whole == value
    for end in range(1, len(text)):
        found = call("json_text.js", "m.partial(x)?.value ?? 'none'", text[:end])
        assert found != "none", text[:end]
        assert fits(found, value), (text[:end], found)
    for text in ("}", "{]", "{1: 2", "1 2", '{"a":1} x', "text"):
        assert call("json_text.js", "m.partial(x)", text) is None, text


def fits(part: Any, whole: Any) -> bool:
    """Whether a value is the beginning of another."""
    if isinstance(whole, dict):
        return isinstance(part, dict) and all(
            k in whole and fits(v, whole[k]) for k, v in part.items()
        )
    if isinstance(whole, list):
        return isinstance(part, list) and len(part) <= len(whole) and all(map(fits, part, whole))
    if isinstance(whole, str):
        return isinstance(part, str) and whole.startswith(part)
    return part == whole or isinstance(whole, int | float)


def test_json_is_indented_without_changing_it(call: Call) -> None:
    text = '{"a":[1,{"b":[]},12345678901234567890],"c":{},"d":"x, {y}","d":1.50'
    assert call("json_text.js", "m.pretty(x)", text) == (
        '{\n  "a": [\n    1,\n    {\n      "b": []\n    },\n    12345678901234567890\n  ],\n'
        '  "c": {},\n  "d": "x, {y}",\n  "d": 1.50'
    )


@pytest.mark.parametrize(
    ("schema", "value", "errors"),
    [
        ({"type": "integer"}, 1.5, ["the answer: expected integer, found number"]),
        ({"type": ["string", "null"]}, None, []),
        ({"enum": [1, {"b": 2, "a": 1}]}, {"a": 1, "b": 2}, []),
        ({"const": "x"}, "y", ['the answer: expected "x"']),
        ({"properties": {"a": {"type": "string"}}}, {"a": 1}, ["/a: expected string, found number"]),
        ({"required": ["a", "b"]}, {"a": 1}, ['the answer: missing "b"']),
        ({"additionalProperties": False, "properties": {"a": {}}}, {"b": 1}, ['the answer: unexpected "b"']),
        ({"items": {"minimum": 3}}, [1, 3], ["/0: expected at least 3"]),
        ({"prefixItems": [{"type": "string"}], "items": False}, ["a", 1], ["/1: nothing is allowed here"]),
        ({"pattern": "^a+$"}, "ab", ["the answer: expected a text that matches ^a+$"]),
        ({"minLength": 2}, "\U0001f600", ["the answer: expected a length of at least 2"]),
        ({"multipleOf": 0.1}, 0.3, []),
        ({"anyOf": [{"type": "string"}, {"minimum": 3}]}, 1, ["the answer: fits none of anyOf"]),
        ({"oneOf": [{"type": "number"}, {"minimum": 0}]}, 1, ["the answer: fits several of oneOf"]),
        ({"not": {"type": "number"}}, 1, ["the answer: fits what is excluded"]),
        ({"if": {"type": "number"}, "then": {"minimum": 5}}, 1, ["the answer: expected at least 5"]),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"type": "null"}}}, 1, ["the answer: expected null, found number"]),
        ({"$ref": "#"}, 1, []),
        ({"uniqueItems": True}, [1, 1], ["the answer: expected different items"]),
        ({"properties": {"__proto__": {"type": "string"}}}, {"a": 1}, []),
    ],
)  # fmt: skip
def test_schemas(call: Call, schema: Any, value: Any, errors: list[str]) -> None:
    found = call("schema.js", "m.validate(JSON.parse(x[0]), JSON.parse(x[1]))", [json.dumps(value), json.dumps(schema)])  # fmt: skip
    assert found == {"errors": errors, "unchecked": []}


def test_what_a_schema_has_and_the_page_does_not_know_is_said(call: Call) -> None:
    schema = {"format": "date", "required": 5, "pattern": "(", "contains": {}, "toString": 1}
    found = call("schema.js", "m.validate(x[0], x[1])", [{"a": 1}, schema])
    assert found["unchecked"] == ["contains", "format", "required", "toString"]
    assert call("schema.js", "m.validate('a', x)", schema)["unchecked"][-1] == "toString"


def test_an_unfinished_value_lacks_nothing_yet(call: Call) -> None:
    schema = {
        "required": ["a", "b"],
        "properties": {"a": {"minLength": 9, "enum": ["something long"]}, "b": {"minItems": 2}},
        "additionalProperties": False,
    }
    check = """(() => {
      const found = JSON.parse(x[0]).map((text) => {
        const part = m.partial(text);
        return part && import('/page/js/schema.js').then((s) => s.validate(part.value, x[1], part.open).errors);
      });
      return Promise.all(found);
    })()"""
    whole = '{"a": "something long", "b": [1, 2]}'
    texts = [whole[:end] for end in range(1, len(whole) + 1)]
    found = call("json_text.js", check, [json.dumps(texts), schema])
    assert [errors for errors in found if errors] == []
    [[error]] = call(
        "json_text.js", check, [json.dumps(['{"a": "something long", "b": [1]']), schema]
    )
    assert error == "/b: expected a number of items of at least 2"


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_events_are_read_however_they_are_cut(call: Call, size: int) -> None:
    text = ': comment\n\ndata: {"a":"é"}\r\n\r\nevent: x\ndata:two\ndata: lines\n\ndata: [DONE]\r\rdata: lost'
    read = """(async () => {
      const bytes = new TextEncoder().encode(x[0]);
      const body = new ReadableStream({start(c) {
        for (let i = 0; i < bytes.length; i += x[1]) c.enqueue(bytes.slice(i, i + x[1]));
        c.close();
      }});
      const found = [];
      for await (const data of m.events(body)) found.push(data);
      return found;
    })()"""
    assert call("events.js", read, [text, size]) == ['{"a":"é"}', "two\nlines", "[DONE]"]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("3", 3), ("0.4", 1), (None, None), ("soon", None), ("Thu, 01 Jan 1970 00:00:00 GMT", 0)],
)
def test_seconds_to_wait(call: Call, header: str | None, seconds: int | None) -> None:
    assert call("client.js", "m.retry_after(x)", header) == seconds


def test_the_request_has_what_was_set_and_nothing_else(call: Call) -> None:
    body = "m.requestBody(x)"
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "", "error": {"text": "failed"}, "tool_calls": []},
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "content": "",
            "reasoning": "long",
            "tool_calls": [{"id": "1", "name": "f", "arguments": "{}"}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "c"},
    ]
    found = call("answer.js", body, {"model": "m", "messages": messages, "settings": {}})
    assert found == {
        "model": "m",
        "stream": True,
        "stream_options": {"include_usage": True},
        "messages": [
            {"role": "user", "content": "a\n\nb"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": "c"},
        ],
    }
    tools = [{"name": "f"}, {"type": "function", "function": {"name": "g"}}]
    settings = {"temperature": 0, "stop": "a\n\\n", "system": "s", "tools": json.dumps(tools)}
    found = call("answer.js", body, {"model": "m", "messages": [], "settings": settings})
    assert (found["temperature"], found["stop"], found["tool_choice"]) == (0, ["a", "\n"], "auto")
    assert [tool["function"]["name"] for tool in found["tools"]] == ["f", "g"]
    assert found["messages"] == [{"role": "system", "content": "s"}]


def test_chunks_become_an_answer_with_its_times(call: Call) -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant"},
        {"reasoning_content": "hm"},
        {"content": "a"},
        {"tool_calls": [{"index": 1, "id": "2", "function": {"name": "g", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "id": "1", "function": {"name": "f", "arguments": "{"}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]},
    ]
    chunks: list[dict[str, Any]] = [{"choices": [{"delta": delta}]} for delta in deltas]
    usage = {"prompt_tokens": 7, "completion_tokens": 11}
    usage |= {"prompt_tokens_details": {"cached_tokens": 4}}  # type: ignore[dict-item]
    chunks += [{"choices": [{"finish_reason": "tool_calls"}]}, {"choices": [], "usage": usage}]
    read = """(() => {
      let now = 0;
      const message = m.newAnswer('tiny');
      const reader = new m.AnswerReader(message, () => now);
      for (const chunk of x) { now += 500; reader.add(chunk); }
      return message;
    })()"""
    assert call("answer.js", read, chunks) == {
        "role": "assistant",
        "model": "tiny",
        "reasoning": "hm",
        "content": "a",
        "tool_calls": [
            {"id": "1", "name": "f", "arguments": "{}"},
            {"id": "2", "name": "g", "arguments": ""},
        ],
        "finish_reason": "tool_calls",
        # 11 tokens: the first after 1 s, the last 2 s later
        "stats": {"prompt": 7, "cached": 4, "generated": 11, "first_seconds": 1, "speed": 5},
    }
