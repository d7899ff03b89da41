"""Runs a conversation in which the model calls tools, until it answers without a call."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import inspect
import json
import pathlib
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from sdk.api.errors import RequestError, ToolError
from sdk.api.flags import check_flags
from sdk.api.schemas import load
from sdk.quant.safe_repr import safe_message, safe_repr
from sdk.tools.definitions import Tool, ToolLike, argument_types, tools_of
from sdk.tools.messages import AssistantMessage, Message, ToolCall, arguments_of

#: Answers a conversation, given as messages in the form of OpenAI's chat API.
Chat = Callable[[list[dict[str, Any]]], AssistantMessage]
AsyncChat = Callable[[list[dict[str, Any]]], Awaitable[AssistantMessage]]

Stopped = Literal["answered", "max_turns", "not_run"]
#: Results may be nested at most this deep.
_MAX_DEPTH = 64


class ToolRun(NamedTuple):
    """The result of :func:`run_tools`.

    ``messages``: the whole conversation, with the calls and their results.
    ``output``: the last answer of the model.
    ``turns``: how many answers the model gave.
    ``stopped``: ``"answered"``: the last answer has no calls. Otherwise none of its calls was run.
    ``"max_turns"``: there were that many answers. ``"not_run"``: a tool has no function.
    """

    messages: list[dict[str, Any]]
    output: AssistantMessage
    turns: int
    stopped: Stopped


def run_tools(
    chat: Chat,
    messages: Iterable[Message],
    tools: Iterable[ToolLike],
    max_turns: int = 8,
    *,
    on_error: Literal["message", "raise"] = "message",
    parsed_arguments: bool = False,
) -> ToolRun:
    """Call ``chat`` and the functions it asks for, until it asks for none.

    The results go back to the model as messages of the role ``tool``: a string as it is, anything
    else as JSON. If a function fails, if its arguments do not fit, or if there is no such tool, the
    message has the text of the error, so that the model can correct itself.

    :param chat: gets the messages so far and returns the answer.
    :param max_turns: at most this many answers.
    :param on_error: ``"raise"``: raise :class:`~sdk.api.errors.ToolError` instead.
    :param parsed_arguments: the messages have the arguments of calls as objects instead of JSON
        text, which most chat templates need.
    :raises RequestError: an option is invalid, or a function is a coroutine function (use
        :func:`arun_tools`).
    """
    turns = _Turns(messages, tools, max_turns, on_error, parsed_arguments)
    for tool in turns.tools.values():
        if _is_async(tool):
            raise RequestError(f"run_tools: {tool.name} is a coroutine function; use arun_tools")
    while turns.stopped is None:
        for call in turns.add(chat(list(turns.messages))):
            try:
                text = result_text(turns.start(call))
            except Exception as error:  # whatever the tool's function raises
                text = turns.error_text(call, error)
            turns.add_result(call, text)
    return turns.result()


async def arun_tools(
    chat: AsyncChat,
    messages: Iterable[Message],
    tools: Iterable[ToolLike],
    max_turns: int = 8,
    *,
    on_error: Literal["message", "raise"] = "message",
    parsed_arguments: bool = False,
) -> ToolRun:
    """Like :func:`run_tools`, with an asynchronous ``chat``.

    Coroutine functions of one answer run at the same time. Other functions run in the thread of the
    event loop, one after the other.
    """
    turns = _Turns(messages, tools, max_turns, on_error, parsed_arguments)
    while turns.stopped is None:
        calls = turns.add(await chat(list(turns.messages)))
        texts = await _gathered([_run(turns, call) for call in calls])
        for call, text in zip(calls, texts, strict=True):
            turns.add_result(call, text)
    return turns.result()


async def _run(turns: _Turns, call: ToolCall) -> str:
    """The result of one call as text."""
    try:
        result = turns.start(call)
        return result_text(await result if inspect.isawaitable(result) else result)
    except Exception as error:  # whatever the tool's function raises
        return turns.error_text(call, error)


async def _gathered(runs: Sequence[Coroutine[Any, Any, str]]) -> list[str]:
    """The results of all; if one raises, the others are cancelled."""
    import asyncio  # takes 30 ms, and run_tools does not need it

    tasks = [asyncio.ensure_future(run) for run in runs]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class _Turns:
    """A conversation while it runs."""

    def __init__(
        self,
        messages: Iterable[Message],
        tools: Iterable[ToolLike],
        max_turns: int,
        on_error: str,
        parsed_arguments: bool,
    ) -> None:
        if type(max_turns) is not int or max_turns < 1:
            raise RequestError(
                f"max_turns: expected an integer of at least 1, found {safe_repr(max_turns)}"
            )
        if on_error not in ("message", "raise"):
            raise RequestError(
                f"on_error: expected 'message' or 'raise', found {safe_repr(on_error)}"
            )
        if isinstance(messages, str | bytes | Mapping):
            raise RequestError(f"messages: expected a list of dicts, found {safe_repr(messages)}")
        self.messages: list[dict[str, Any]] = []
        for message in messages:
            if not isinstance(message, Mapping):
                raise RequestError(f"messages: expected dicts, found {safe_repr(message)}")
            self.messages.append(dict(message))
        self.tools = {tool.name: tool for tool in tools_of(tools)}
        self.stopped: Stopped | None = None
        self._max_turns = max_turns
        self._raise = on_error == "raise"
        check_flags(parsed_arguments=parsed_arguments)
        self._parsed_arguments = parsed_arguments
        self._turns = 0
        self._output = AssistantMessage()

    def add(self, answer: AssistantMessage) -> tuple[ToolCall, ...]:
        """Add an answer; the calls to run now."""
        if not isinstance(answer, AssistantMessage):
            raise RequestError(
                f"chat: expected it to return an AssistantMessage, found {safe_repr(answer)}"
            )
        self._output = answer
        self._turns += 1
        self.messages.append(answer.as_dict(parsed_arguments=self._parsed_arguments))
        if not answer.tool_calls:
            self.stopped = "answered"
        elif self._turns == self._max_turns:
            self.stopped = "max_turns"
        elif any(self._has_no_function(call) for call in answer.tool_calls):
            self.stopped = "not_run"
        return () if self.stopped else answer.tool_calls

    def _has_no_function(self, call: ToolCall) -> bool:
        tool = self.tools.get(call.name)
        return tool is not None and tool.function is None

    def start(self, call: ToolCall) -> Any:
        """Call the tool's function. :raises ValueError: the call does not fit the tool."""
        if call.error is not None:
            raise _CallError(call.error)
        tool = self.tools.get(call.name)
        if tool is None or tool.function is None:
            names = ", ".join(self.tools) or "none"
            raise _CallError(f"there is no tool {call.name!r}; the tools are: {names}")
        return tool.function(**_arguments(tool, call.arguments))

    def error_text(self, call: ToolCall, error: Exception) -> str:
        """The message of a failed call. :raises ToolError: with ``on_error="raise"``."""
        text = str(error) if isinstance(error, _CallError) else safe_message(error)
        if self._raise:
            raise ToolError(f"{call.name}: {text}") from error
        return f"Error: {text}"

    def add_result(self, call: ToolCall, text: str) -> None:
        self.messages.append(
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}
        )

    def result(self) -> ToolRun:
        assert self.stopped is not None
        return ToolRun(self.messages, self._output, self._turns, self.stopped)


class _CallError(ValueError):
    """What the model did wrong; the message is for it."""


def _is_async(tool: Tool) -> bool:
    function = tool.function
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  # its kind matters, not whether it exists
    )


def _arguments(tool: Tool, text: str) -> dict[str, Any]:
    """The arguments of a call, with the types of the function's parameters."""
    assert tool.function is not None
    try:
        given = arguments_of(text)
    except ValueError as error:
        raise _CallError(str(error)) from error
    names = tool.parameters.get("properties", {})
    for name in given:
        if name not in names and tool.parameters.get("additionalProperties") is False:
            known = ", ".join(names) or "none"
            raise _CallError(f"{tool.name} has no parameter {name!r}; its parameters are: {known}")
    missing = [name for name in tool.parameters.get("required", ()) if name not in given]
    if missing:
        raise _CallError(f"{tool.name} needs the parameters: {', '.join(missing)}")
    types = _types(tool.function)
    return {
        name: _loaded(tool, name, types[name], value) if name in types else value
        for name, value in given.items()
    }


def _types(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return argument_types(function)
    except RequestError:  # of a Tool whose schema was written by hand: it gets what JSON gives
        return {}


def _loaded(tool: Tool, name: str, annotation: Any, value: Any) -> Any:
    try:
        return load(annotation, value)
    except Exception as error:  # of a pydantic model, or of a class of the caller
        raise _CallError(f"{tool.name}: {name}: {safe_message(error)}") from error


def result_text(value: Any) -> str:
    """What a tool returned, for the model: a string as it is, anything else as JSON.

    Dataclasses, named tuples and pydantic models are objects, enums their values, sets lists, and
    dates, paths, UUIDs and decimals strings.

    :raises ValueError: there is no JSON for it.
    """
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        return value
    plain = _plain(value, 0)
    return (
        plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False, allow_nan=False)
    )


def _plain(value: Any, depth: int) -> Any:
    """A value made of what JSON has."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"the result is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, enum.Enum):
        return _plain(value.value, depth + 1)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "model_dump") and not inspect.isclass(value):  # pydantic
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not inspect.isclass(value):
        return {
            one.name: _plain(getattr(value, one.name), depth + 1)
            for one in dataclasses.fields(value)
        }
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(_plain(key, depth + 1)): _plain(one, depth + 1) for key, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one, depth + 1) for one in value]
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, uuid.UUID | decimal.Decimal | pathlib.PurePath):
        return str(value)
    raise ValueError(
        f"the result has no JSON: {type(value).__name__}; return a string, a dict, a list or a "
        "dataclass"
    )
