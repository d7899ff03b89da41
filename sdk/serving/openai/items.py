"""The items of OpenAI's Responses API: of the input as messages, and of an answer."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.outputs import CompletionOutput
from sdk.quant.safe_repr import safe_repr
from sdk.requests.typed_outputs import MessageAnswer
from sdk.serving.openai.requests import Body

_TEXTS = ("input_text", "output_text", "text", "refusal")
#: Parameters that name something that OpenAI keeps.
_REFUSED = ("conversation", "prompt")
_IGNORED = ("include", "max_tool_calls", "context_management")


def chat_body(
    body: Body, earlier: Sequence[Mapping[str, Any]] = (), *, images: bool = False
) -> dict[str, Any]:
    """The body of a chat completion that asks for the same as one of ``/v1/responses``.

    Parameters that both have are left in ``body``. ``earlier``: the messages before the input.
    ``images``: the model reads them.

    :raises RequestError: a parameter is invalid or not supported.
    """
    for name in _REFUSED:
        if body.take(name) is not None:
            raise RequestError(
                f"{name}: is not supported; send the whole conversation as input, or use "
                "previous_response_id"
            )
    if body.take_flag("background"):
        raise RequestError("background: is not supported; leave it out")
    truncation = body.take("truncation", "disabled")
    if truncation not in ("disabled", "auto"):
        raise RequestError(
            f"truncation: expected 'disabled' or 'auto', found {safe_repr(truncation)}"
        )
    body.take_all(_IGNORED)
    made: dict[str, Any] = {"messages": messages_of(body.take("input"), earlier, images)}
    instructions = body.take_text("instructions")
    if instructions is not None:
        made["messages"].insert(0, {"role": "system", "content": instructions})
    if truncation == "auto":
        made["truncate_prompt_tokens"] = -1
    if (most := body.take("max_output_tokens")) is not None:
        made["max_tokens"] = most
    if (tools := body.take("tools")) is not None:
        made["tools"] = _tools(tools)
    choice = body.take("tool_choice")
    if isinstance(choice, Mapping) and "name" in choice:
        choice = {"type": "function", "function": {"name": choice["name"]}}
    made["tool_choice"] = choice if made.get("tools") or choice != "auto" else None
    reasoning = body.take("reasoning")
    if isinstance(reasoning, Mapping):
        made["reasoning_effort"] = reasoning.get("effort")
    elif reasoning is not None:
        raise RequestError(f"reasoning: expected an object, found {safe_repr(reasoning)}")
    made["response_format"] = _format(body.take("text"))
    if body.take("top_logprobs", 0) != 0:
        raise RequestError("top_logprobs: is supported only by chat completions; leave it out")
    return made


def _format(text: object) -> dict[str, Any] | None:
    """``response_format`` for ``text``."""
    if text is None:
        return None
    if not isinstance(text, Mapping):
        raise RequestError(f"text: expected an object, found {safe_repr(text)}")
    found = text.get("format")
    if not isinstance(found, Mapping):
        if found is None:
            return None
        raise RequestError(f"text: expected a format that is an object, found {safe_repr(found)}")
    if found.get("type") == "json_schema":
        return {"type": "json_schema", "json_schema": dict(found)}
    return dict(found)


def _tools(given: object) -> list[dict[str, Any]]:
    """Functions in the form of chat completions."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RequestError(f"tools: expected a list, found {safe_repr(given)}")
    made = []
    for index, tool in enumerate(given):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise RequestError(
                f"tools[{index}]: expected a tool of type 'function', found {safe_repr(tool)}"
            )
        function = {key: value for key, value in tool.items() if key != "type"}
        made.append({"type": "function", "function": function})
    return made


def messages_of(
    given: object, earlier: Sequence[Mapping[str, Any]] = (), images: bool = False
) -> list[dict[str, Any]]:
    """The messages of an input, which is a text or a list of items, after ``earlier`` ones.

    :raises RequestError: it is neither, or an item is invalid.
    """
    messages = [dict(message) for message in earlier]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, Sequence) or not given:
        raise RequestError(f"input: expected a text or a list of items, found {safe_repr(given)}")
    for index, item in enumerate(given):
        if not isinstance(item, Mapping):
            raise RequestError(f"input[{index}]: expected an object, found {safe_repr(item)}")
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": _content(index, item, images)})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            last = messages[-1] if messages else {}
            if last.get("role") == "assistant":
                last.setdefault("tool_calls", []).append(call)
            else:
                messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        elif kind == "function_call_output":
            content = _content(index, {"content": item.get("output")}, images)
            message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            messages.append(message)
        elif kind != "reasoning":  # a model does not get its earlier reasoning again
            raise RequestError(
                f"input[{index}]: expected the type message, function_call, function_call_output "
                f"or reasoning, found {safe_repr(kind)}"
            )
    return messages


def _content(index: int, item: Mapping[str, Any], images: bool) -> Any:
    """A text, or parts as chat completions have them."""
    content = item.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content
    parts = []
    for part in content:
        if images and isinstance(part, Mapping) and part.get("type") == "input_image":
            parts.append(_image(index, part))
            continue
        if not isinstance(part, Mapping) or part.get("type") not in _TEXTS:
            kinds = "text parts and images" if images else "text parts (this model reads no images)"
            raise RequestError(
                f"input[{index}]: expected content of {kinds}, found {safe_repr(part)}"
            )
        parts.append({"type": "text", "text": part.get("text", part.get("refusal"))})
    return parts


def _image(index: int, part: Mapping[str, Any]) -> dict[str, Any]:
    url = part.get("image_url")
    if not isinstance(url, str) or part.get("file_id") is not None:
        raise RequestError(
            f"input[{index}]: expected an input_image with image_url, a data URL, found "
            f"{safe_repr(dict(part))}"
        )
    return {"type": "image_url", "image_url": {"url": url}}


# ---- answers -------------------------------------------------------------------------------------


def new_id(prefix: str) -> str:
    """An id such as ``msg_...``."""
    return f"{prefix}_{uuid.uuid4().hex}"


def message_item(item_id: str, text: str, status: str = "completed") -> dict[str, Any]:
    """The text of an answer."""
    return {
        "id": item_id,
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": [text_part(text)] if text or status == "completed" else [],
    }


def text_part(text: str) -> dict[str, Any]:
    """A part of a message."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def reasoning_item(item_id: str, text: str, status: str = "completed") -> dict[str, Any]:
    """The reasoning before an answer."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {
        "id": item_id,
        "type": "reasoning",
        "summary": [],
        "content": content,
        "status": status,
    }


def call_item(
    item_id: str, call_id: str, name: str, arguments: str, status: str = "completed"
) -> dict[str, Any]:
    """A tool call."""
    return {
        "id": item_id,
        "type": "function_call",
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": status,
    }


def items_of(answer: CompletionOutput) -> list[dict[str, Any]]:
    """The items of a whole answer."""
    if not isinstance(answer, MessageAnswer):
        return [message_item(new_id("msg"), answer.text)]
    found, items = answer.message, []
    if found.reasoning:
        items.append(reasoning_item(new_id("rs"), found.reasoning))
    if found.content or not found.tool_calls:
        items.append(message_item(new_id("msg"), found.content))
    for call in found.tool_calls:
        items.append(call_item(new_id("fc"), call.id, call.name, call.arguments))
    return items
