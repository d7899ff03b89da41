"""Answers of every family, as documented, and what they mean."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any, NamedTuple

from sdk.tools import (
    AssistantMessage,
    MessageDelta,
    MessageParser,
    Tool,
    ToolCall,
    format_named,
    reasoning_named,
)

WEATHER = Tool(
    "get_weather",
    "The weather of a city.",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
)
TIME = Tool(
    "get_time",
    "The time in a zone.",
    {"type": "object", "properties": {"zone": {"type": "string"}}, "required": ["zone"]},
)
NOW = Tool("now", "The time here.", {"type": "object", "properties": {}})
TOOLS = (WEATHER, TIME, NOW)

PARIS = ("get_weather", {"city": "Paris"})
PARIS_3 = ("get_weather", {"city": "Paris", "days": 3})
CET = ("get_time", {"zone": "CET"})
PARIS_3_METRIC = ("get_weather", {"city": "Paris", "days": 3, "metric": True})
NOW_CALL: tuple[str, dict[str, Any]] = ("now", {})

Calls = tuple[tuple[str, dict[str, Any]], ...]


class Output(NamedTuple):
    """An answer, and the message that it is.

    ``constrained``: whether the format's grammar for calls accepts the text after the reasoning.
    """

    name: str
    format: str
    text: str
    calls: Calls = ()
    content: str = ""
    reasoning: str = ""
    how: str | None = None
    opened: bool = False
    constrained: bool = False


class Parsed(NamedTuple):
    message: AssistantMessage
    deltas: list[MessageDelta]


def parse(
    pieces: Iterable[str],
    format: str | None,
    how: str | None = None,
    opened: bool = False,
    tools: tuple[Tool, ...] = TOOLS,
) -> Parsed:
    """The message of an answer that arrives in pieces."""
    numbers = count()
    parser = MessageParser(
        None if format is None else format_named(format),
        None if how is None else reasoning_named(how),
        tools,
        opened,
        new_id=lambda: f"id-{next(numbers)}",
    )
    deltas = [parser.push(piece) for piece in pieces]
    deltas.append(parser.finish())
    return Parsed(parser.message, deltas)


def parse_output(output: Output, pieces: Iterable[str]) -> Parsed:
    return parse(pieces, output.format, output.how, output.opened)


def added_up(deltas: list[MessageDelta]) -> AssistantMessage:
    """The message that deltas add up to, as a client of OpenAI's API would do it."""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for one in delta.tool_calls:
            if one.index == len(calls):
                assert one.id is not None and one.name is not None
                calls.append({"id": one.id, "name": one.name, "arguments": "", "error": None})
            else:
                assert one.index == len(calls) - 1 and one.id is None and one.name is None
            calls[one.index]["arguments"] += one.arguments
            calls[one.index]["error"] = one.error
    return AssistantMessage(
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        tuple(ToolCall(**call, index=index) for index, call in enumerate(calls)),
    )


def by_name(output: Output) -> str:
    return output.name


_HERMES = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
_HERMES_2 = '<tool_call>\n{"name": "get_time", "arguments": {"zone": "CET"}}\n</tool_call>'
_CODER = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
_GRANITE = '[{"name": "get_weather", "arguments": {"city": "Paris"}}]'
_ANALYSIS = "<|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant"
_COMMENTARY = (
    "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
    '{"city": "Paris"}<|call|>'
)
_GEMMA = "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>"

OUTPUTS: tuple[Output, ...] = (
    # Hermes, Qwen2.5, Qwen3
    Output("hermes", "hermes", _HERMES, (PARIS,), constrained=True),
    Output("hermes-two", "hermes", f"{_HERMES}\n{_HERMES_2}", (PARIS, CET), constrained=True),
    Output("hermes-eos", "hermes", f"{_HERMES}<|im_end|>", (PARIS,)),
    Output("hermes-text", "hermes", f"Let me look.\n\n{_HERMES}", (PARIS,), "Let me look."),
    Output(
        "hermes-reversed",
        "hermes",
        '<tool_call>{"arguments": {"city": "Paris", "days": 3}, "name": "get_weather"}</tool_call>',
        (PARIS_3,),
    ),
    Output(
        "hermes-one-block",
        "hermes",
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        '{"name": "get_time", "arguments": {"zone": "CET"}}</tool_call>',
        (PARIS, CET),
    ),
    Output(
        "hermes-no-arguments", "hermes", '<tool_call>{"name": "now"}</tool_call>', (("now", {}),)
    ),
    Output(
        "hermes-null",
        "hermes",
        '<tool_call>{"name": "now", "arguments": null,}</tool_call>',
        (("now", {}),),
    ),
    Output(
        "hermes-openai",
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "get_weather", '
        '"arguments": "{\\"city\\": \\"Paris\\"}"}}</tool_call>',
        (PARIS,),
    ),
    Output(
        "qwen3-thinks",
        "hermes",
        f"<think>\nThe user wants <tool_call>s.\n</think>\n\n{_HERMES}",
        (PARIS,),
        reasoning="The user wants <tool_call>s.",
        how="think",
    ),
    Output(
        "qwen3-opened",
        "hermes",
        f"Hm.\n</think>\n\nI will look.\n{_HERMES}\n",
        (PARIS,),
        "I will look.",
        "Hm.",
        how="think",
        opened=True,
    ),
    Output(
        "qwen3-answer",
        "hermes",
        "<think>\n\n</think>\n\nNo call:  just text. \n",
        (),
        "No call:  just text. \n",
        how="think",
    ),
    # Qwen3-Coder
    Output("coder", "qwen3_coder", _CODER, (PARIS_3,), constrained=True),
    Output("coder-two", "qwen3_coder", f"Now:\n{_CODER}\n{_CODER}", (PARIS_3, PARIS_3), "Now:"),
    Output(
        "coder-no-outer",
        "qwen3_coder",
        "<function=get_weather>\n<parameter=city>\nPa\n\nris <b>\n</parameter>\n"
        "<parameter=metric>\nTrue\n</parameter>\n</function>\n</tool_call>",
        (("get_weather", {"city": "Pa\n\nris <b>", "metric": True}),),
    ),
    # Llama 3.1, 3.2 and 3.3
    Output(
        "llama",
        "llama_json",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',
        (PARIS,),
        constrained=True,
    ),
    Output(
        "llama-tag",
        "llama_json",
        '<|python_tag|>{"type": "function", "name": "get_weather", '
        '"parameters": {"city": "Paris"}}<|eom_id|>',
        (PARIS,),
    ),
    Output(
        "llama-two",
        "llama_json",
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}; '
        '{"name": "get_time", "parameters": {"zone": "CET"}}',
        (PARIS, CET),
        constrained=True,
    ),
    Output(
        "llama-lines",
        "llama_json",
        '{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        '{"name": "get_time", "parameters": {"zone": "CET"}}<|eot_id|>',
        (PARIS, CET),
    ),
    Output(
        "llama-after-text",
        "llama_json",
        'Sure:\n\n{"name": "now", "parameters": {}}',
        (NOW_CALL,),
        "Sure:",
    ),
    Output(
        "llama-list",
        "llama_json",
        '[{"name": "get_weather", "parameters": {"city": "Paris"}}]<|eot_id|>',
        (PARIS,),
    ),
    Output(
        "llama-function",
        "llama_json",
        '<function=get_weather>{"city": "Paris"}</function><|eom_id|>',
        (PARIS,),
    ),
    Output("llama-builtin", "llama_json", '<|python_tag|>get_time.call(zone="CET")', (CET,)),
    # Llama 4, Llama 3.2
    Output(
        "pythonic",
        "pythonic",
        '[get_weather(city="Paris", days=3), get_time(zone="CET")]',
        (PARIS_3, CET),
        constrained=True,
    ),
    Output(
        "pythonic-marks",
        "pythonic",
        "<|python_start|>[get_weather(city='Paris', days=\"3\")]<|python_end|><|eot|>",
        (PARIS_3,),
    ),
    Output(
        "pythonic-position",
        "pythonic",
        '[get_weather("Paris", 3, True), now()]',
        (PARIS_3_METRIC, NOW_CALL),
    ),
    # Mistral
    Output(
        "mistral",
        "mistral_args",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]get_time[ARGS]{"zone": "CET"}',
        (PARIS, CET),
        constrained=True,
    ),
    Output(
        "mistral-v11",
        "mistral_args",
        'I look.[TOOL_CALLS]get_weather[CALL_ID]f0h9TBxQ1[ARGS]{"city": "Paris"}</s>',
        (PARIS,),
        "I look.",
    ),
    Output("mistral-no-args", "mistral_args", '[TOOL_CALLS]get_time{"zone": "CET"}', (CET,)),
    Output(
        "mistral-v3",
        "mistral_list",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}, "id": "f0h9TBxQ1"}, '
        '{"name": "get_time", "arguments": {"zone": "CET"}}]',
        (PARIS, CET),
        constrained=True,
    ),
    Output(
        "magistral",
        "mistral_args",
        '[THINK]Hm.[/THINK][TOOL_CALLS]get_time[ARGS]{"zone": "CET"}',
        (CET,),
        reasoning="Hm.",
        how="magistral",
    ),
    # gpt-oss
    Output(
        "harmony",
        "harmony",
        _ANALYSIS + _COMMENTARY,
        (PARIS,),
        reasoning="I need the weather.",
        how="harmony",
    ),
    Output("harmony-call", "harmony", _COMMENTARY, (PARIS,), how="harmony", constrained=True),
    Output(
        "harmony-stopped",
        "harmony",
        (_ANALYSIS + _COMMENTARY).removesuffix("<|call|>"),
        (PARIS,),
        reasoning="I need the weather.",
    ),
    Output(
        "harmony-role",
        "harmony",
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": '
        '"Paris"}<|call|>',
        (PARIS,),
    ),
    Output(
        "harmony-preamble",
        "harmony",
        f"{_ANALYSIS}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{_COMMENTARY}",
        (PARIS,),
        "I look.",
        "I need the weather.",
    ),
    Output(
        "harmony-final",
        "harmony",
        f"{_ANALYSIS}<|channel|>final<|message|>It is \n\n sunny.<|return|>",
        (),
        "It is \n\n sunny.",
        "I need the weather.",
        how="harmony",
    ),
    Output(
        "harmony-opened",
        "harmony",
        "Hm.<|end|><|start|>assistant<|channel|>final<|message|>Sunny.<|return|>",
        (),
        "Sunny.",
        "Hm.",
        how="harmony",
        opened=True,
    ),
    # DeepSeek
    Output(
        "deepseek-v3",
        "deepseek_v3",
        "<｜tool▁calls▁begin｜>"
        + _V3.format("get_weather", '{"city": "Paris"}')
        + "\n"
        + _V3.format("get_time", '{"zone": "CET"}')
        + "<｜tool▁calls▁end｜>",
        (PARIS, CET),
        constrained=True,
    ),
    Output(
        "deepseek-v31",
        "deepseek_v31",
        "<｜tool▁calls▁begin｜>"
        + _V31.format("get_weather", '{"city": "Paris"}')
        + _V31.format("get_time", '{"zone": "CET"}')
        + "<｜tool▁calls▁end｜>",
        (PARIS, CET),
        constrained=True,
    ),
    Output(
        "deepseek-r1",
        "deepseek_v3",
        "<think>\nHm.\n</think>\nI look.<｜tool▁calls▁begin｜>"
        + _V3.format("get_weather", '{"city": "Paris"}')
        + "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
        (PARIS,),
        "I look.",
        "Hm.",
        how="think",
    ),
    # Gemma
    Output("gemma-list", "gemma_text", '[get_weather(city="Paris")]', (PARIS,), constrained=True),
    Output(
        "gemma-json",
        "gemma_text",
        '{"name": "get_weather", "parameters": {"city": "Paris"}}',
        (PARIS,),
    ),
    Output(
        "gemma-fence",
        "gemma_text",
        '```json\n{"name": "get_weather", "parameters": {"city": "Paris"}}\n```<end_of_turn>',
        (PARIS,),
    ),
    Output(
        "gemma-code",
        "gemma_text",
        'I look.\n```tool_code\nprint(get_weather(city="Paris"))\nx = get_time(zone="CET")\n```',
        (PARIS, CET),
        "I look.",
    ),
    Output("gemma-code-list", "gemma_text", "```tool_code\n[now(), now(),]\n```", (NOW_CALL,) * 2),
    Output("functiongemma", "functiongemma", _GEMMA, (PARIS,), constrained=True),
    Output(
        "functiongemma-types",
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Paris, {x}<escape>,days:3,metric:false}"
        f"<end_function_call>{_GEMMA}<start_function_response>",
        (("get_weather", {"city": "Paris, {x}", "days": 3, "metric": False}), PARIS),
    ),
    Output(
        "gemma-4",
        "gemma_4",
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
        (PARIS_3,),
        constrained=True,
    ),
    Output(
        "gemma-4-thinks",
        "gemma_4",
        "<|channel>thought\nHm.\n<channel|>I look."
        '<|tool_call>call:get_time{zone:<|"|>CET<|"|>}<tool_call|><|tool_response>',
        (CET,),
        "I look.",
        "Hm.",
        how="channel_thought",
    ),
    # Granite
    Output("granite", "granite_list", f"<|tool_call|>{_GRANITE}", (PARIS,), constrained=True),
    Output("granite-text", "granite_list", f"<tool_call>{_GRANITE}<|end_of_text|>", (PARIS,)),
    Output("granite-bare", "granite_list", _GRANITE, (PARIS,)),
    Output(
        "granite-20b",
        "granite_list",
        '<function_call> {"name": "get_weather", "arguments": {"city": "Paris"}}\n'
        '<function_call> {"name": "get_time", "arguments": {"zone": "CET"}}',
        (PARIS, CET),
    ),
    Output(
        "granite-thinks",
        "granite_list",
        "Here is my thought process: Hm.\n\nHere is my response: Sunny.",
        (),
        "Sunny.",
        "Hm.",
        how="thought_process",
    ),
    Output("phi4", "granite_list", f"<|tool_call|>{_GRANITE}<|/tool_call|><|end|>", (PARIS,)),
    # SmolLM, Olmo
    Output(
        "smollm2",
        "smollm2",
        '<tool_call>[\n{"name": "get_weather", "arguments": {"city": "Paris"}},\n'
        '{"name": "get_time", "arguments": {"zone": "CET"}}\n]</tool_call>',
        (PARIS, CET),
        constrained=True,
    ),
    Output("smollm2-none", "smollm2", "<tool_call>[]</tool_call>"),
    Output("smollm3-xml", "smollm3", _HERMES, (PARIS,), constrained=True),
    Output(
        "smollm3-python",
        "smollm3",
        '<think>\nHm.\n</think>\n<code>\nget_weather(city="Paris", days=3)\n</code><|im_end|>',
        (PARIS_3,),
        reasoning="Hm.",
        how="think",
    ),
    Output(
        "olmo3",
        "olmo3",
        '<function_calls>\nget_weather(city="Paris")\nget_time(zone="CET")\n</function_calls>',
        (PARIS, CET),
        constrained=True,
    ),
)
