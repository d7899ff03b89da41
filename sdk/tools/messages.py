"""What a model answered: text, reasoning and tool calls, whole or in pieces.

Messages and calls have the shape of OpenAI's chat API. Deltas are named tuples, because one is made
per piece of text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

#: One message of a conversation, as in OpenAI's chat API.
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for. ``arguments`` is JSON text, as in OpenAI's API.

    ``error`` is ``None`` for a valid call: a known tool, and arguments that are a JSON object.
    Otherwise it says what is wrong, and ``arguments`` is what the model wrote as far as it came.
    Whether the arguments fit the tool's schema is not checked here.
    """

    id: str
    name: str
    arguments: str
    index: int = 0
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The call in the form of OpenAI's chat API."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True, slots=True)
class AssistantMessage:
    """An answer. Texts that the model did not write are empty strings."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def as_dict(self, *, parsed_arguments: bool = False) -> dict[str, Any]:
        """The message for the next prompt, in the form of OpenAI's chat API.

        Most chat templates write ``arguments | tojson``: for them ``parsed_arguments=True`` gives
        an object instead of JSON text. Arguments that are no JSON object stay text.
        """
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            calls = [call.as_dict() for call in self.tool_calls]
            if parsed_arguments:
                for call in calls:
                    call["function"]["arguments"] = _parsed(call["function"]["arguments"])
            message["tool_calls"] = calls
        return message


class ToolCallDelta(NamedTuple):
    """What is new in one call.

    The first delta of a call has ``id`` and ``name``, later ones have ``None``. ``arguments`` is
    the next piece of its JSON text. ``error`` comes with the last delta of an invalid call.
    """

    index: int  # type: ignore[assignment]  # the number of the call, not tuple.index
    id: str | None = None
    name: str | None = None
    arguments: str = ""
    error: str | None = None


class MessageDelta(NamedTuple):
    """What is new since the last delta; false if there is nothing."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.tool_calls)


def arguments_of(text: str) -> dict[str, Any]:
    """The arguments of a call. :raises ValueError: they are not a JSON object."""
    try:
        value = json.loads(text, parse_constant=_reject)
    except RecursionError as error:
        raise ValueError("the arguments are nested too deeply") from error
    except ValueError as error:
        raise ValueError(f"the arguments are not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"the arguments are not a JSON object but {text[:40]!r}")
    return value


def _parsed(text: str) -> Any:
    try:
        return arguments_of(text)
    except ValueError:
        return text


def with_arguments(messages: Sequence[Message], *, as_objects: bool) -> list[Message]:
    """The messages with the arguments of their calls as objects, or as JSON text: which of the two
    OpenAI's clients send is not what a chat template writes. What is not a JSON object stays."""
    return [_with_arguments(message, as_objects) for message in messages]


def _with_arguments(message: Message, as_objects: bool) -> Message:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, list | tuple):
        return message  # what it is instead, the chat template's reader says
    return {**message, "tool_calls": [_call_with_arguments(call, as_objects) for call in calls]}


def _call_with_arguments(call: Any, as_objects: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    function = call.get("function")
    if isinstance(function, Mapping):
        return {**call, "function": _call_with_arguments(function, as_objects)}
    arguments = call.get("arguments")
    if as_objects and isinstance(arguments, str):
        return {**call, "arguments": _parsed(arguments)}
    if not as_objects and isinstance(arguments, Mapping):
        return {**call, "arguments": json.dumps(dict(arguments), ensure_ascii=False)}
    return call


def _reject(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
