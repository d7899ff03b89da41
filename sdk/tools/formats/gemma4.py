"""Gemma 4: FunctionGemma's calls with other marks.

    <|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>

Sources: the chat template of google/gemma-4-31B-it; vLLM's tool_chat_template_gemma4.jinja.
"""

from __future__ import annotations

from sdk.tools.format import ToolFormat
from sdk.tools.gemma_calls import GemmaCalls

_CALLS = GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>')

FORMAT = ToolFormat(
    name="gemma_4",
    order=25,
    in_template=((_CALLS.opening,),),
    tokens=(_CALLS.opening,),
    triggers=(_CALLS.opening,),
    closing={_CALLS.opening: _CALLS.closing},
    turn_ends=("<|tool_response>", "<turn|>", "<eos>"),
    read=_CALLS.read,
    rules=_CALLS.rules,
)
