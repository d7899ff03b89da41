"""Templates of well-known models give the same text as in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from sdk.loaders.templates.chat_template import ChatTemplate, TemplateError
from tests.text.conftest import read_metadata
from tests.text.known_templates import KNOWN

NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The <weather> of a "city"',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "é", "enum": ["a", "b"]},
                "days": {"type": ["integer", "null"]},
                "units": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["city"],
        },
    },
}
SYSTEM = {"role": "system", "content": "Be nice.\n"}
USER = {"role": "user", "content": " Hi <there> 日本 "}
ANSWER = {"role": "assistant", "content": "<think>\nhm</think>\n\nHello"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "type": "function",
            "id": "abcdefghi",
            "function": {"name": "weather", "arguments": {"city": "Paris", "days": 2}},
        }
    ],
}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "abcdefghi", "content": "20 °C"}
CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}
CONVERSATIONS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "one message": ([USER], {}),
    "a system message": ([SYSTEM, USER], {}),
    "several turns": ([SYSTEM, USER, ANSWER, USER, ANSWER, USER], {}),
    "turns without a system message": ([USER, ANSWER, USER], {}),
    "no generation prompt": ([USER, ANSWER], {"add_generation_prompt": False}),
    "tools": ([SYSTEM, USER], {"tools": [TOOL]}),
    "a call": ([USER, CALL, RESULT, ANSWER, USER], {"tools": [TOOL]}),
    "no thinking": ([USER], {"enable_thinking": False}),
    "documents": ([USER], {"documents": [{"title": "t", "text": "x"}]}),
    "reasoning": ([USER, {**ANSWER, "reasoning_content": "why"}], {}),
    "continued": ([USER, ANSWER], CONTINUED),
    "continued after spaces": ([SYSTEM, USER, {**ANSWER, "content": "Sure: \n"}], CONTINUED),
    "continued from nothing": ([USER, {**ANSWER, "content": ""}], CONTINUED),
    "a user's message continued": ([USER], CONTINUED),
    "switches": ([USER], {"reasoning_effort": "high", "date_string": "1 Jan 2026"}),
}
REAL = ["smollm2"]


def compare(source: str, messages: list[Any], options: dict[str, Any]) -> bool:
    """Whether both render it; where transformers cannot, we must not either."""
    options = dict(options)
    prompt, tools = options.pop("add_generation_prompt", True), options.pop("tools", None)
    documents = options.pop("documents", None)
    try:
        [theirs], _ = render_jinja_template(
            [messages],
            tools=tools,
            documents=documents,
            chat_template=source,
            add_generation_prompt=prompt,
            **NAMES,
            **options,
        )
    except Exception:
        theirs = None
    if documents is not None:
        options["documents"] = documents
    try:
        ours = ChatTemplate(source).render(
            messages, tools=tools, add_generation_prompt=prompt, special_tokens=NAMES, **options
        )
    except TemplateError as error:
        dropped = "does not use" in str(error) or "drop" in str(error)
        assert theirs is None or dropped, f"only we refuse it: {error}"
        return False
    assert ours == theirs
    return True


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", KNOWN)
def test_a_known_template_renders_as_in_transformers(name: str) -> None:
    rendered = [compare(KNOWN[name], *case) for case in CONVERSATIONS.values()]
    assert sum(rendered) >= 5


@pytest.mark.parametrize("folder", ["arch-llama3", "arch-gemma3", "arch-qwen3"])
def test_the_templates_of_golden_folders_render_as_in_transformers(
    golden: Path, folder: str
) -> None:
    source = (golden / folder / "hf" / "chat_template.jinja").read_text()
    assert any(compare(source, *case) for case in CONVERSATIONS.values())


def test_the_template_of_a_real_file_renders_as_in_transformers(smollm2: Path) -> None:
    source = read_metadata(smollm2)["tokenizer.chat_template"]
    assert sum(compare(source, *case) for case in CONVERSATIONS.values()) >= 5
