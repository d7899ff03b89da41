"""SmolLM3: Hermes' blocks for ``xml_tools``, Python code for ``python_tools``.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

    <code>
    get_weather(city="Paris")
    </code>

Source: the chat template of HuggingFaceTB/SmolLM3-3B. Its code is meant for a notebook. A block is
a call only if it consists of calls of the tools with literal arguments; other code is content.
"""

from __future__ import annotations

from sdk.tools.building import MessageBuilder
from sdk.tools.format import ToolFormat
from sdk.tools.formats.hermes import call_rules
from sdk.tools.python_calls import read_code
from sdk.tools.stream import Reads, TextStream
from sdk.tools.tagged import TAGS, TURN_ENDS, read_tagged


def read(stream: TextStream, builder: MessageBuilder, mark: str) -> Reads[None]:
    if mark == "<code>":
        yield from read_code(stream, builder, "</code>")
    else:
        yield from read_tagged(stream, builder, mark)


FORMAT = ToolFormat(
    name="smollm3",
    order=60,
    in_template=(("### XML Tools",), ("xml_tools", "python_tools")),
    triggers=(*TAGS, "<code>"),
    closing=TAGS,
    turn_ends=TURN_ENDS,
    read=read,
    rules=call_rules,
)
