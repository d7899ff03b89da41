"""Bodies of Anthropic's Messages API as bodies of chat completions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr
from sdk.serving.images import data_url
from sdk.serving.openai.requests import Body

#: A text, or an image.
_Piece: TypeAlias = "str | dict[str, Any]"

#: Parameters about a request that change nothing in its answer here.
_IGNORED = (
    *("cache_control", "service_tier", "inference_geo", "speed", "context_management"),
    *("user_profile_id", "workspace_id", "diagnostics"),
)
_REFUSED = ("container", "mcp_servers", "fallbacks")
_MEDIA = ("image/jpeg", "image/png", "image/gif", "image/webp")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = {"enabled": True, "disabled": False, "adaptive": None, "between_tools": None}
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}


def chat_body(body: Body, *, images: bool = False) -> dict[str, Any]:
    """The body of a chat completion that asks for the same. ``images``: the model reads them.

    Parameters that both have are left in ``body``.

    :raises RequestError: a parameter is invalid or not supported.
    """
    body.take_all(_IGNORED)
    for name in _REFUSED:
        if body.take(name):
            raise RequestError(f"{name}: is not supported; leave it out")
    messages = _system(body.take("system")) + _messages(body.take("messages"), images)
    made: dict[str, Any] = {"messages": messages, "stop": body.take("stop_sequences")}
    if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        made["continue_final_message"] = True  # the answer goes on where it ends
    if tools := body.take("tools"):
        made["tools"] = _tools(tools)
    made |= _choice(body.take("tool_choice"), bool(tools))
    if (variables := _thinking(body.take("thinking"))) is not None:
        made["chat_template_kwargs"] = {"enable_thinking": variables}
    made |= _output(body.take("output_config"), body.take("output_format"))
    return made


def _system(given: object) -> list[dict[str, Any]]:
    """``system``: a text, or blocks of text."""
    if given is None:
        return []
    parts = _texts("system", given)
    return [{"role": "system", "content": _joined(parts)}] if parts else []


def _messages(given: object, images: bool) -> list[dict[str, Any]]:
    """Messages of chat completions. Neighbours with the same role are one turn."""
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise RequestError(f"messages: expected a list of messages, found {safe_repr(given)}")
    made: list[dict[str, Any]] = []
    names: dict[str, str] = {}  # of the tools that were called, by the ids of the calls
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise RequestError(f"{where}: expected an object, found {safe_repr(message)}")
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            raise RequestError(
                f"{where}: expected the role 'user' or 'assistant', found {safe_repr(role)}"
            )
        if role == "user":
            turns = _asked(where, content, names, images)
        elif role == "assistant":
            turns = [_answered(where, content, names)]
        else:
            turns = [{"role": role, "content": _texts(where, content)}]
        for turn in turns:
            if made and made[-1]["role"] == turn["role"] != "tool":
                _extend(made[-1], turn)
            else:
                made.append(turn)
    return [{**one, "content": _joined(one["content"])} for one in made]


def _extend(turn: dict[str, Any], more: Mapping[str, Any]) -> None:
    turn["content"] = [*turn["content"], *more["content"]]
    if calls := more.get("tool_calls"):
        turn["tool_calls"] = [*turn.get("tool_calls", ()), *calls]
    if reasoning := more.get("reasoning_content"):
        turn["reasoning_content"] = turn.get("reasoning_content", "") + reasoning


def _asked(
    where: str, content: object, names: Mapping[str, str], images: bool
) -> list[dict[str, Any]]:
    """A user's message: results of tools, texts and images."""
    turns: list[dict[str, Any]] = []
    said: list[_Piece] = []
    for block in _blocks(where, content):
        if block.get("type") != "tool_result":
            said.append(_piece(where, block, "text or tool_result", images))
            continue
        inside = _blocks(where, block.get("content") or "")
        found = [_piece(where, one, "text", images) for one in inside]
        text = next((one for one in found if isinstance(one, str)), "")
        if block.get("is_error") and not text.lower().startswith("error"):
            found = [f"Error: {found[0]}", *found[1:]] if found[:1] == [text] else ["Error", *found]
        call = _id(where, block, "tool_use_id")
        turn = {"role": "tool", "tool_call_id": call, "content": found}
        turns.append({**turn, "name": names[call]} if call in names else turn)
    return [*turns, {"role": "user", "content": said}] if said or not turns else turns


def _piece(where: str, block: Mapping[str, Any], expected: str, images: bool) -> _Piece:
    """A text, or an image as a part of a chat completion's message."""
    if block.get("type") != "image" or not images:
        return _text(where, block, f"image, {expected}" if images else expected)
    source = block.get("source")
    kind = source.get("type") if isinstance(source, Mapping) else None
    if isinstance(source, Mapping) and kind == "base64":
        media = source.get("media_type")
        return data_url(f"{where}: image", source.get("data"), media if media in _MEDIA else "")
    if isinstance(source, Mapping) and kind == "url" and isinstance(source.get("url"), str):
        return {"type": "image_url", "image_url": {"url": source["url"]}}
    raise RequestError(
        f"{where}: image: expected a source of type 'base64' or 'url', found {safe_repr(source)}"
    )


def _answered(where: str, content: object, names: dict[str, str]) -> dict[str, Any]:
    """An assistant's message: texts, calls and reasoning."""
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    reasoning = ""
    for block in _blocks(where, content):
        kind = block.get("type")
        if kind == "tool_use":
            name, given = block.get("name"), block.get("input")
            if not isinstance(name, str) or not isinstance(given, Mapping):
                raise RequestError(
                    f"{where}: tool_use: expected a name and an input that is an object, found "
                    f"{safe_repr(block)}"
                )
            function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
            call = _id(where, block, "id")
            calls.append({"id": call, "type": "function", "function": function})
            names[call] = name
        elif kind == "thinking":
            thoughts = block.get("thinking")
            reasoning += thoughts if isinstance(thoughts, str) else ""
        elif kind != "redacted_thinking":  # nobody here can read it
            texts.append(_text(where, block, "text, tool_use or thinking"))
    made: dict[str, Any] = {"role": "assistant", "content": texts}
    if calls:
        made["tool_calls"] = calls
    if reasoning:
        made["reasoning_content"] = reasoning
    return made


def _id(where: str, block: Mapping[str, Any], name: str) -> str:
    """The id of a call."""
    found = block.get(name)
    if not isinstance(found, str) or not found:
        raise RequestError(
            f"{where}: {name}: expected a non-empty string, found {safe_repr(found)}"
        )
    return found


def _blocks(where: str, content: object) -> list[Mapping[str, Any]]:
    """The blocks of a content, which may be a text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, Sequence) or not all(isinstance(one, Mapping) for one in content):
        raise RequestError(
            f"{where}: expected content that is a text or a list of blocks, found "
            f"{safe_repr(content)}"
        )
    return list(content)


def _texts(where: str, content: object) -> list[str]:
    """The texts of a content without other blocks."""
    return [_text(where, block, "text") for block in _blocks(where, content)]


def _text(where: str, block: Mapping[str, Any], expected: str) -> str:
    """The text of a block. :raises RequestError: it is another one."""
    kind, text = block.get("type"), block.get("text")
    if kind in ("image", "document"):
        raise RequestError(f"{where}: {kind}s are not supported; send their text")
    if kind != "text" or not isinstance(text, str):
        raise RequestError(f"{where}: expected a block of {expected}, found {safe_repr(block)}")
    return text


def _joined(pieces: Sequence[_Piece]) -> Any:
    """A text, or with images a list of parts in which neighbouring texts are one."""
    parts: list[dict[str, Any]] = []
    for piece in pieces:
        if not isinstance(piece, str):
            parts.append(piece)
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += f"\n{piece}"
        else:
            parts.append({"type": "text", "text": piece})
    if any(part["type"] != "text" for part in parts):
        return parts
    return parts[0]["text"] if parts else ""


def _tools(given: object) -> list[dict[str, Any]]:
    """Tools as functions. :raises RequestError: one runs on Anthropic's servers."""
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise RequestError(f"tools: expected a list, found {safe_repr(given)}")
    made = []
    for index, tool in enumerate(given):
        if not isinstance(tool, Mapping) or tool.get("type") not in (None, "custom"):
            raise RequestError(
                f"tools[{index}]: expected a tool with a name and an input_schema; tools that run "
                f"on a server are not supported; found {safe_repr(tool)}"
            )
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        made.append({"type": "function", "function": function})
    return made


def _choice(given: object, tools: bool) -> dict[str, Any]:
    """``tool_choice``."""
    if given is None:
        return {}
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(given, Mapping) or kind not in (*_CHOICES, "tool"):
        raise RequestError(
            "tool_choice: expected an object with the type 'auto', 'any', 'tool' or 'none', found "
            f"{safe_repr(given)}"
        )
    made: dict[str, Any] = {}
    if kind == "tool":
        made["tool_choice"] = {"type": "function", "function": {"name": given.get("name")}}
    elif tools or kind != "auto":
        made["tool_choice"] = _CHOICES[str(kind)]
    if given.get("disable_parallel_tool_use"):
        made["parallel_tool_calls"] = False
    return made


def _thinking(given: object) -> bool | None:
    """Whether the chat template shall begin with reasoning; ``None``: as it does by itself."""
    if given is None:
        return None
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(kind, str) or kind not in _THINKING:
        raise RequestError(
            f"thinking: expected an object with the type {', '.join(map(repr, _THINKING))}, found "
            f"{safe_repr(given)}"
        )
    return _THINKING[kind]


def _output(config: object, form: object) -> dict[str, Any]:
    """``output_config``: an effort, and the schema of the answer (also as ``output_format``)."""
    if config is not None and not isinstance(config, Mapping):
        raise RequestError(f"output_config: expected an object, found {safe_repr(config)}")
    effort = (config or {}).get("effort")
    made: dict[str, Any] = {}
    if effort is not None:
        if not isinstance(effort, str) or effort not in _EFFORTS:
            raise RequestError(
                f"output_config: expected the effort {', '.join(map(repr, _EFFORTS))}, found "
                f"{safe_repr(effort)}"
            )
        made["reasoning_effort"] = _EFFORTS[effort]
    form = form if form is not None else (config or {}).get("format")
    if form is None:
        return made
    if not isinstance(form, Mapping) or form.get("type") != "json_schema":
        raise RequestError(
            "output_config: expected a format with the type 'json_schema' and a schema, found "
            f"{safe_repr(form)}"
        )
    made["structured_outputs"] = {"json": form.get("schema")}
    return made
