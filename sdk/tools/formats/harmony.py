"""gpt-oss: every part of an answer is a message of its own, in a channel.

    <|channel|>analysis<|message|>I need the weather.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>
    {"city": "Paris"}<|call|>

(without the line breaks). The channel ``analysis`` is reasoning; ``commentary`` without a recipient
and ``final`` are content. The recipient may also come before the channel. Sources:
developers.openai.com/cookbook/articles/openai-harmony, the chat template of openai/gpt-oss-20b, and
vLLM's openai_tool_parser.py.

The tokens must be in the text: without them, the channels cannot be told apart.
"""

from __future__ import annotations

import re

from sdk.tools.building import MessageBuilder
from sdk.tools.definitions import Tool
from sdk.tools.format import ToolFormat
from sdk.tools.rules import TEXT, CallRules, Rules
from sdk.tools.stream import NotACallError, Reads, TextStream

_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_HEADERS = ("<|start|>", "<|channel|>")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_TEXT_FOLLOWS = "<|message|>"
#: Headers are at most this long.
_MAX_HEADER = 512


def read(stream: TextStream, builder: MessageBuilder, mark: str) -> Reads[None]:
    """Messages one after the other, each with a header and a text."""
    next_mark: str | None = mark
    while next_mark in _HEADERS:
        header = next_mark + (yield from _read_header(stream))
        recipient = _RECIPIENT.search(header)
        if recipient is not None:
            builder.begin(recipient[1], known=False)
            stream.kept()
            next_mark = yield from stream.until(_ENDS + _HEADERS, builder.arguments)
            builder.end()
        else:
            channel = _CHANNEL.search(header)
            is_reasoning = channel is not None and channel[1] == "analysis"
            part = builder.reasoning if is_reasoning else builder.content
            part.new_section()
            stream.kept()
            next_mark = yield from stream.until(_ENDS + _HEADERS, part.write)
            if next_mark is not None:
                part.mark()
        stream.keep(next_mark or "")


def _read_header(stream: TextStream) -> Reads[str]:
    """A header, with the mark of the text that follows."""
    header = ""
    while not header.endswith(_TEXT_FOLLOWS):
        header += yield from stream.take()
        if len(header) > _MAX_HEADER:
            raise NotACallError("a header is too long")
    return header


def call_rules(rules: Rules, tools: tuple[Tool, ...], parallel: bool) -> CallRules:
    """One call: the model waits for its result. A text for the user may come before it."""
    start = f"({rules.mark('<|start|>assistant')})?"
    channel = rules.mark("<|channel|>commentary")
    call = rules.any_of(
        f"{rules.literal(f' to=functions.{tool.name} ')} {rules.mark('<|constrain|>json')} "
        f"{rules.mark(_TEXT_FOLLOWS)} {rules.arguments(tool)}"
        for tool in tools
    )
    text = rules.text_until("<|end|>")
    before = f"({start} {channel} {rules.mark(_TEXT_FOLLOWS)} {text})?"
    final = f"{start} {rules.mark('<|channel|>final<|message|>')} {TEXT}"
    calls = f"{before} {start} {channel} {call} ({rules.mark('<|call|>')})?"
    return CallRules(calls, otherwise=final)


FORMAT = ToolFormat(
    name="harmony",
    order=10,
    in_template=(("<|channel|>", "<|message|>"),),
    tokens=("<|channel|>",),
    triggers=_HEADERS,
    turn_ends=_ENDS,
    read=read,
    rules=call_rules,
    channels=True,
)
