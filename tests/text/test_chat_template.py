"""Rendering conversations: what templates may use, and what is refused."""

# ruff: noqa: E501 (tables of one-line templates)

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import pytest

from sdk.loaders.templates import budget as template_budget
from sdk.loaders.templates.chat_template import MAX_DEPTH, ChatTemplate, TemplateError

LAUGHS: Any = "ha"
for _ in range(30):
    LAUGHS = [LAUGHS] * 10
USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: Any = USER, **kwargs: Any) -> str:
    return ChatTemplate(source).render(messages, **kwargs)


def test_blocks_trim_their_lines_as_in_transformers() -> None:
    source = "{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}\n"
    assert render(source) == "user\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for i in [1,2] %}{{ loop.last }}{{ loop.length }} {% endfor %}", "False2 True2 "),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "Hi"),
        ('{{ {"a": "<é>", "b": [1]}|tojson }}', '{"a": "<é>", "b": [1]}'),
        ("{{ {'b': 1, 'a': 2}|tojson(indent=1, sort_keys=true) }}", '{\n "a": 2,\n "b": 1\n}'),
        ("{{ {'a': [1, 2]}|tojson(separators=(',', ':')) }}", '{"a":[1,2]}'),
        ("{% for row in [1, 2, 3]|batch(2) %}{{ row }}{% endfor %}", "[1, 2][3]"),
        ("{{ 'abc'|batch(2, '-')|list }}", "[['a', 'b'], ['c', '-']]"),
        ("{{ range(5)|slice(2)|map('length')|list }}", "[3, 2]"),
        ("{{ 'a b, c'|wordcount }} {{ 'aa bb cc'|wordwrap(5) }}", "3 aa bb\ncc"),
        ("{{ '<b>x</b>  y'|striptags }}|{{ 'ä &'|urlencode }}", "x y|%C3%A4%20%26"),
        ("{{ {'a': 'x y'}|urlencode }} {{ 1500000|filesizeformat }}", "a=x+y 1.5 MB"),
        ("{{ 2048|filesizeformat(true) }} {{ [1, 'a']|pprint }}", "2.0 KiB [1, 'a']"),
        ("<p{{ {'id': 'a', 'b': none}|xmlattr }}>", '<p id="a">'),
        ("{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}", "abab"),
        ("{% set j = joiner('; ') %}{% for i in range(3) %}{{ j() }}{{ i }}{% endfor %}", "0; 1; 2"),
        ("{{ strftime_now('%Y')|length }}", "4"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f('a') ~ f(1) }}", "<a><1>"),
        ("{{ bos_token }}{{ messages|map(attribute='role')|join(',') }}{{ eos_token }}", "[B]user"),
        ("{{ 'a,b'.split(',')[1] + '%s-%02d' % ('x', 3) + '{}'.format(4) }}", "bx-034"),
        ("{{ ' x '|trim }}{{ ('ab' * 2)|upper }}{{ 2 ** 3 }}{{ 7 // 2 }}{{ -3|abs }}", "xABAB833"),
        ("{{ (messages + [1])|length }}{{ messages[1:]|length }}{{ tools is none }}", "20True"),
        ("{{ 'b' in ['a', 'b'] }}{{ messages[0] is mapping }}{{ x is defined }}", "TrueTrueFalse"),
        ("{{ messages|selectattr('role', 'equalto', 'user')|list|length }}", "1"),
        ("{{ add_generation_prompt }}", "True"),
        ("{{ 1 < 2 < 3 }}{{ 1 < 2 > 3 }}{{ 2 not in [1] }}", "TrueFalseTrue"),
        ("{{ 'user' in messages|map(attribute='role') }}", "True"),
        ("{{ 'abcdef'[1:4] ~ 'abcdef'[::-2] ~ [1, 2, 3][-2:] }}", "bcdfdb[2, 3]"),
        ("{% macro m() %}{{ varargs|length }}{{ kwargs.a }}{% endmacro %}{{ m(*[1, 2], **{'a': 3}) }}", "23"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{{ dict(a=1)|items|list }}", "a1[('a', 1)]"),
        ("{% for i in [[1, [2]], [3]] recursive %}{{ loop(i) if i is iterable else i }},{% endfor %}", "1,2,,,3,,"),
        ("{{ 'a-b'|title ~ 'x\\ny'|indent(2) ~ 'abcdef'|truncate(4, true, '.', 0) }}", "A-Bx\n  yabc."),
        ("{{ '<b>'|e ~ ('<' | safe) + '<' }}", "&lt;b&gt;<<"),
        ("{{ 'a b c'.rsplit(' ', 1)[0] ~ 'abab'.rfind('ab') ~ 'xxaxx'.strip('x') }}", "a b2a"),
    ],
)  # fmt: skip
def test_what_templates_use_works(source: str, expected: str) -> None:
    assert render(source, special_tokens={"bos_token": "[B]"}) == expected


@pytest.mark.parametrize(
    ("message", "written"),
    [
        ({"content": None}, ""),
        ({}, ""),
        ({"content": None, "reasoning_content": "hm", "tool_calls": []}, ""),
        ({"content": None, "reasoning": "hm", "audio": None, "function_call": None}, ""),
        ({"content": None, "refusal": "no"}, "no"),
        ({"content": "x", "refusal": None, "annotations": [], "tool_calls": None}, "x"),
        (
            {"content": [{"type": "text", "text": "x"}, {"type": "refusal", "refusal": "no"}]},
            "x\nno",
        ),
    ],
)
def test_an_answer_may_come_back_as_a_server_wrote_it(
    message: dict[str, Any], written: str
) -> None:
    messages = [*USER, {"role": "assistant", **message}]
    assert render("{{ messages[1].content }}", messages) == written
    parts = "{% for part in messages[1].content %}{{ part.text }}{% endfor %}"
    if isinstance(message.get("content"), list):
        assert render(parts, messages) == "xno"


def test_a_template_may_refuse_a_conversation() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not callable"),
        ("{{ (messages|attr('__class__')).x }}", "unsafe|undefined"),
        ("{% include 'other' %}", "include.*not available.*line 1"),
        ("x\n{% import 'os' as os %}", "import.*not available.*line 2"),
        ("{{ 'x'.encode('punycode') }}", "encode of a str, which is not available"),
        ("{{ messages|map('string') }}", "printing a list_iterator, which is not available"),
        ("{{ lipsum(n=9999) }}", "undefined"),
        ("{{ cycler() }}", "at least one item"),
        ("{{ [1]|random }}", "compile.*random"),
        ("{{ 'www.a.b'|urlize }}", "compile.*urlize"),
        ("{{ [1]|batch(10**9) }}", "argument of more than"),
        ("{{ ('a ' * 9999)|wordwrap(9) }}", "wordwrap of more than 8192 characters"),
        ("{{ range(9999)|pprint }}", "pprint of more than 16384 characters"),
        ("{{ [range]|first|pprint }}", "printing a .*, which is not available"),
        ("{{ missing.field }}", "undefined"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages|xmlattr }}", "failed: AttributeError"),
        ("{% for %}", "compile at line 1"),
        ("x\n{% if %}", "compile at line 2"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "compile.*Recursion"),
        ("{{ 1" + "+1" * 15000 + " }}", "rejected.*more than 20000 words and symbols"),
        ("{{ 1" + "+1" * 200 + " }}", "rejected.*nested too deeply"),
        ("{{ 1 }}" * 6100, "rejected.*more than 6000 statements"),
        (
            "{% if a %}{% endif %}" * 500 + "".join(f"{{{{ a{i} }}}}" for i in range(500)),
            "500 branches and 501 names",
        ),
        ("{% for a in [1] %}" * 60 + "{% endfor %}" * 60, "rejected.*nested too deeply"),
        ("{% for a in [1] %}" * 25 + "{% endfor %}" * 25, "compile.*too many"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "64 nested macro calls"),
        ("{% set n = namespace() %}{% set n._x = 1 %}", "underscore"),
        ("x" * 65537, "65537 bytes"),
    ],
)
def test_attacks_and_mistakes_end_in_a_template_error(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match=f"(?s){words}"):
        render(source)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("tokenize", True, "cannot be set"),
        ("chat_template", "x", "cannot be set"),
        ("bos_token", "x", "cannot be set"),
        ("raise_exception", "x", "cannot be set"),
        ("_private", 1, "cannot be set"),
        ("persno", 1, "no argument 'persno'; did you mean person"),
        ("person", object(), "person: expected plain data, found object"),
        ("person", {1: 2}, "string keys, found int"),
    ],
)
def test_arguments_are_checked(name: str, value: Any, words: str) -> None:
    template = ChatTemplate("{{ person }}{{ bos_token }}{{ tokenize }}")
    with pytest.raises(TemplateError, match=words):
        template.render(USER, **{name: value})


def test_arguments_that_the_template_reads_or_that_are_common_are_accepted() -> None:
    assert render("{{ person }}", person="me", enable_thinking=False) == "me"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("Hi", "a list of messages, found str"),
        ({"role": "user"}, "a list of messages, found dict"),
        (None, "found NoneType"),
        ([], "at least one"),
        (["Hi"], r"messages\[0\]: expected a dict, found str"),
        ([{"content": "Hi"}], "a role"),
        ([{"role": 5, "content": "Hi"}], "a role.*found 5"),
        ([{"role": "user"}], r"messages\[0\]: expected content"),
        ([{"role": "user", "content": None}], "expected content"),
        (
            [{"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}],
            "found type 'refusal'",
        ),
        ([{"role": "user", "content": "x", "n": 10**5000}], "n: expected a shorter number"),
        ([{"role": "user", "content": "x", "n": LAUGHS}], "values in one conversation"),
        ([{"role": "user", "content": "x" * 2**22}] * 2, "characters in one conversation"),
        ([{"role": "user", "content": 5}], "a string or a list of parts, found int"),
        ([{"role": "user", "content": ["x"]}], r"content\[0\].*found str"),
        ([{"role": "user", "content": [{"type": "image"}]}], "found type 'image'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "found type 'text'"),
        ([{"role": "user", "content": "x", "extra": object()}], "extra: expected plain data"),
    ],
)
def test_messages_are_checked(messages: Any, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        render("x", messages)


def test_tools_that_are_dropped_are_an_error() -> None:
    with pytest.raises(TemplateError, match="does not use tools"):
        render("{{ messages[0].content }}", tools=[{"name": "now"}])
    assert "now" in render("{{ tools }}", tools=[{"name": "now"}])


def test_nesting_is_bounded() -> None:
    deep: Any = "x"
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    with pytest.raises(TemplateError, match="nested more than"):
        render("x", [{"role": "user", "content": "x", "deep": deep}])
    with pytest.raises(TemplateError, match=r"tools.*nested more than"):
        render("x", tools=deep)


def test_an_assistant_may_have_tool_calls_instead_of_content() -> None:
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}]
    assert render("{{ messages[0].tool_calls and messages[0].content is none }}", calls) == "True"


def test_text_parts_reach_a_template_in_the_form_it_reads() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]}]
    assert render("{{ messages[0]['content'] + '!' }}", parts) == "a\nb!"
    loop = "{% for part in messages[0]['content'] %}<{{ part.text }}>{% endfor %}"
    assert render(loop, parts) == "<a><b>"


def test_a_longer_conversation_may_take_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some templates look back over all messages at each of them."""
    source = "{% for m in messages %}{% for k in messages %}{{ k.role }}{% endfor %}{% endfor %}"
    monkeypatch.setattr(template_budget, "MAX_SECONDS", 0.0)
    monkeypatch.setattr(template_budget, "SECONDS_PER_MESSAGE", 0.0)
    with pytest.raises(TemplateError, match="more than 0 s of CPU time"):
        render(source, USER * 300)
    monkeypatch.setattr(template_budget, "SECONDS_PER_MESSAGE", 1.0)
    assert len(render(source, USER * 300)) == 300 * 300 * len("user")


def test_printing_a_namespace_does_not_descend_into_it() -> None:
    source = "{% set n = namespace() %}{% for i in range(60) %}{% set n = namespace(a=n, b=n) %}{% endfor %}{{ n }}"
    assert render(source) == "<namespace>"


def test_a_long_conversation_is_far_below_the_budget() -> None:
    source = (
        "{% set ns = namespace(seen=[], text='') %}{% for m in messages %}{% if loop.index0 == "
        "messages|length - 1 %}!{% endif %}{% set ns.seen = ns.seen + [m] %}<{{ m['role'] }}>"
        "{{ m['content']|trim }}{% set ns.text = m.role %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "word " * 100}] * 1000
    assert len(render(source, messages)) > 500_000


def test_one_template_renders_many_times_with_a_fresh_budget() -> None:
    template = ChatTemplate("{% for i in range(99999) %}{% endfor %}{{ messages[0].content }}")
    assert [template.render(USER) for _ in range(25)] == ["Hi"] * 25


@pytest.mark.parametrize(
    ("template", "end"),
    [
        ("{% for m in messages %}<{{ m.content }}>{% endfor %}", "<Hi><Sure, \n"),
        ("{% for m in messages %}<{{ m.content|trim }}>{% endfor %}", "<Hi><Sure,"),
        ("{% for m in messages %}<{{ m.content[0].text }}>{% endfor %}", None),
    ],
)
def test_a_continued_message_ends_the_text(template: str, end: str | None) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Sure, \n"}]
    if end is None:
        with pytest.raises(TemplateError, match="changes the last message or leaves it out"):
            ChatTemplate(template).render(messages, continue_final_message=True)
        return
    text = ChatTemplate(template).render(messages, continue_final_message=True)
    assert text == end
    assert messages[-1]["content"] == "Sure, \n"


def test_the_last_text_part_is_continued() -> None:
    template = "{% for part in messages[0].content %}[{{ part.text }}]{% endfor %}."
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    message = {"role": "assistant", "content": parts}
    assert ChatTemplate(template).render([message], continue_final_message=True) == "[one][two"
    joined = ChatTemplate("<{{ messages[0].content }}>")
    assert joined.render([message], continue_final_message=True) == "<one\ntwo"


def test_a_message_without_text_or_changed_by_the_template_cannot_be_continued() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    with pytest.raises(TemplateError, match="the last message has no text to continue"):
        ChatTemplate("{{ messages|tojson }}").render([call], continue_final_message=True)
    for template in ("{{ messages[0].role }}", "{{ messages[0].content.split('/')[-1] }}"):
        with pytest.raises(TemplateError, match="changes the last message or leaves it out"):
            ChatTemplate(template).render(
                [{"role": "assistant", "content": "a/b"}], continue_final_message=True
            )


def test_a_message_is_shown_with_its_keys_in_the_callers_order() -> None:
    template = ChatTemplate("{{ messages | tojson }}")
    messages = [
        {"name": "ann", "role": "user", "content": "x"},
        {"tool_calls": [{"type": "function", "id": "1", "function": {"name": "f"}}], "role": "b"},
    ]
    shown = [messages[0], {**messages[1], "content": None}]
    assert template.render(messages) == json.dumps(shown)


def test_a_template_goes_with_its_last_name_without_python_s_collector() -> None:
    gc.disable()
    try:
        template = ChatTemplate("{% for m in messages %}{{ m.content|trim|upper }}{% endfor %}")
        assert template.render([{"role": "user", "content": " hi "}]) == "HI"
        code = template._template.root_render_func
        parts = [weakref.ref(part) for part in (template._sandbox, template._template, code)]
        del template, code
        assert [part() for part in parts] == [None, None, None]
    finally:
        gc.enable()
