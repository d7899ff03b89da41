"""Gemma 3, whose chat template does not know tools: its documentation shows three ways.

    [get_weather(city="Paris")]
    {"name": "get_weather", "parameters": {"city": "Paris"}}
    ```tool_code
    print(get_weather(city="Paris"))
    ```

JSON also comes in a block that begins with three backticks and ``json``. Only names of tools make
calls. A block of code is a call only if it consists of calls of the tools with literal arguments.
Sources: ai.google.dev/gemma/docs/capabilities/function-calling; vLLM's template
tool_chat_template_gemma3_pythonic.jinja.
"""

from __future__ import annotations

from sdk.tools import json_calls
from sdk.tools.building import MessageBuilder
from sdk.tools.format import ToolFormat
from sdk.tools.formats import llama, pythonic
from sdk.tools.python_calls import read_code
from sdk.tools.stream import Reads, TextStream

_FENCE = "```"


def read(stream: TextStream, builder: MessageBuilder, mark: str) -> Reads[None]:
    if mark == "```tool_code":
        yield from read_code(stream, builder, _FENCE)
        return
    yield from stream.space()
    if (yield from stream.at("[")):
        yield from llama.read_list(stream, builder, known=True)
    else:
        yield from json_calls.read_calls(stream, builder, known=True)
    if mark:
        yield from stream.space()
        yield from stream.accept(_FENCE)


FORMAT = ToolFormat(
    name="gemma_text",
    order=80,
    in_template=(("<start_of_turn>",),),
    tokens=("<start_of_turn>",),
    triggers=("```tool_code", "```json"),
    closing={"```json": _FENCE},
    bare="[{",
    turn_ends=("<end_of_turn>", "<eos>"),
    read=read,
    rules=pythonic.call_rules,
)
