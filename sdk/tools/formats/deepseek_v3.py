"""DeepSeek-V3 and R1: a type, a name, and the arguments in a block of JSON.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather
    ```json
    {"city": "Paris"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>

Sources: the chat templates of deepseek-ai/DeepSeek-V3-0324 and DeepSeek-R1; vLLM's
deepseekv3_tool_parser.py.
"""

from __future__ import annotations

from sdk.tools.definitions import Tool
from sdk.tools.formats import deepseek
from sdk.tools.rules import CallRules, Rules


def call_rules(rules: Rules, tools: tuple[Tool, ...], parallel: bool) -> CallRules:
    return deepseek.several(rules, [_call(rules, tool) for tool in tools], parallel)


def _call(rules: Rules, tool: Tool) -> str:
    name = rules.literal(f"{tool.name}\n```json\n")
    separator = rules.mark(deepseek.SEPARATOR)
    return f'"function" {separator} {name} {rules.arguments(tool)} "\\n```"'


FORMAT = deepseek.FORMAT._replace(
    name="deepseek_v3",
    order=30,
    in_template=((deepseek.CALLS, "```json"),),
    tokens=(),
    rules=call_rules,
)
