"""Reads calls between ``<tool_call>`` and ``</tool_call>``, in all the ways models write them."""

from __future__ import annotations

from types import MappingProxyType

from sdk.tools import json_calls, xml_calls
from sdk.tools.building import MessageBuilder
from sdk.tools.stream import Reads, TextStream

#: The marks that begin such calls, and those that end them.
TAGS = MappingProxyType({"<tool_call>": "</tool_call>", "<function=": "</function>"})
TURN_ENDS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>")


def read_tagged(stream: TextStream, builder: MessageBuilder, mark: str) -> Reads[None]:
    """JSON objects, a list of them, or ``<function=...>``; the closing mark may be missing."""
    if mark == "<function=":
        yield from xml_calls.read_function(stream, builder)
        yield from stream.space()
        yield from stream.accept("</tool_call>")
        return
    yield from stream.space()
    while True:
        if (yield from stream.accept("<function=")):
            yield from xml_calls.read_function(stream, builder)
        else:
            yield from json_calls.read_calls(stream, builder)
        yield from stream.space()
        if (yield from stream.accept("</tool_call>")):
            return
        if not ((yield from stream.at("{")) or (yield from stream.at("<function="))):
            return
