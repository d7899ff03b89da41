"""Answers of a server in the history of the next request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, RequestError, SamplingParams

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
    {"role": "tool", "tool_call_id": "c1", "content": "2"},
]


def test_calls_of_earlier_turns_need_no_tools(golden: Path) -> None:
    with LLM(golden / "gguf-Q8_0" / "model.gguf", max_model_len=512) as llm:
        greedy = SamplingParams(max_tokens=1, temperature=0)
        [output] = llm.chat(HISTORY, greedy, chat_template=TEMPLATE, use_tqdm=False)
        assert output.prompt is not None and output.prompt.endswith(
            '<user>hi\n<assistant><tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
            "<user>Result of c1: 2\n"
        )
        written = "{{ m.tool_calls[0].function.arguments if m.tool_calls }}"
        reads = f"{{% for m in messages %}}{written}{{% endfor %}}"
        [output] = llm.chat(HISTORY, greedy, chat_template=reads, use_tqdm=False)
        assert output.prompt is not None and output.prompt.endswith('{"a": 1}')
        with pytest.raises(RequestError, match="expected content"):
            llm.chat([{"role": "tool", "content": None}], greedy, chat_template=TEMPLATE)


def test_templates_get_the_arguments_of_calls_as_they_write_them(golden: Path) -> None:
    """Clients of OpenAI's API send JSON text; ``arguments | tojson`` would quote it again."""
    parsed = {**CALL, "function": {"name": "f", "arguments": {"a": 1}}}
    function, params = "m.tool_calls[0].function", SamplingParams(max_tokens=1, temperature=0)
    whole = '{"name": "f", "arguments": {"a": 1}}'
    expected = {
        f"{function}.arguments | tojson": '{"a": 1}',
        f"{function}.arguments": '{"a": 1}',
        f"{function} | tojson": whole,
    }
    with LLM(golden / "gguf-Q8_0" / "model.gguf", max_model_len=512) as llm:
        for call in (CALL, parsed):
            history = [{"role": "user", "content": "x"}, {**HISTORY[1], "tool_calls": [call]}]
            for written, text in expected.items():
                each = f"{{{{ {written} if m.tool_calls }}}}"
                template = f"{{% for m in messages %}}{each}{{% endfor %}}"
                [output] = llm.chat(history, params, chat_template=template, use_tqdm=False)
                assert output.prompt is not None and output.prompt.endswith(text)
