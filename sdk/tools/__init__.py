"""Tool calling: definitions of tools, parsing and constraining calls, and the loop that runs them.

Pure Python: neither torch nor a tokenizer is needed. ``docs/tools.md`` explains it.
"""

from __future__ import annotations

from sdk.tools.definitions import (
    Tool as Tool,
    ToolChoice as ToolChoice,
    tool_choice_of as tool_choice_of,
    tool_from_function as tool_from_function,
    tools_of as tools_of,
)
from sdk.tools.describe import (
    describe_tools as describe_tools,
    for_template as for_template,
    reads_tools as reads_tools,
    with_described_tools as with_described_tools,
)
from sdk.tools.format import (
    ToolFormat as ToolFormat,
    all_formats as all_formats,
    format_named as format_named,
    format_of as format_of,
)
from sdk.tools.grammar import grammar_for as grammar_for
from sdk.tools.loop import (
    ToolRun as ToolRun,
    arun_tools as arun_tools,
    result_text as result_text,
    run_tools as run_tools,
)
from sdk.tools.messages import (
    AssistantMessage as AssistantMessage,
    MessageDelta as MessageDelta,
    ToolCall as ToolCall,
    ToolCallDelta as ToolCallDelta,
)
from sdk.tools.parser import MessageParser as MessageParser
from sdk.tools.reasoning import (
    Reasoning as Reasoning,
    reasoning_named as reasoning_named,
    reasoning_of as reasoning_of,
)
