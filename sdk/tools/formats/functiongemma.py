"""FunctionGemma: names without quotes, and strings between ``<escape>``.

    <start_function_call>call:get_weather{city:<escape>Paris<escape>,days:2}<end_function_call>

Sources: the chat template of google/functiongemma-270m-it, and its page "Formatting and best
practices" at ai.google.dev.
"""

from __future__ import annotations

from sdk.tools.format import ToolFormat
from sdk.tools.gemma_calls import GemmaCalls

_CALLS = GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>")

FORMAT = ToolFormat(
    name="functiongemma",
    order=20,
    in_template=((_CALLS.opening,),),
    tokens=(_CALLS.opening,),
    triggers=(_CALLS.opening,),
    closing={_CALLS.opening: _CALLS.closing},
    turn_ends=("<start_function_response>", "<end_of_turn>", "<eos>"),
    read=_CALLS.read,
    rules=_CALLS.rules,
)
