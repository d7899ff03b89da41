"""Tools of an MCP server for :meth:`sdk.LLM.arun_tools`.

``pip install mcp`` (2 and newer). ``docs/tools.md`` shows it. A server's tools run where the
server runs, with its rights: connect to servers that you trust.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Coroutine
from typing import Any

from sdk.api.errors import RequestError
from sdk.integrations.schemas import closed
from sdk.kernels.packages import needed_for
from sdk.tools import Tool

with needed_for("sdk.integrations.mcp needs"):
    from mcp import Client

#: What names of ours may not have.
_OTHER = re.compile(r"[^a-zA-Z0-9_-]")
_LONGEST = 64


async def tools_of_server(client: Client, only: Collection[str] | None = None) -> list[Tool]:
    """The tools of the server to which ``client`` is connected, for ``arun_tools``.

    ``only``: names of the server's tools; the others are left out. A call goes to the server, on
    the event loop of ``client``; what the tool says is its result, and an error of the tool is a
    message to the model. Characters that names of tools may not have become ``_``.

    :raises RequestError: ``only`` names a tool that the server does not have, or two tools have the
        same name then.
    """
    found: dict[str, Tool] = {}
    missing = set(only or ())
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        for one in page.tools:
            missing.discard(one.name)
            if only is None or one.name in only:
                tool = _tool(client, one)
                if tool.name in found:
                    raise RequestError(
                        f"only: two tools of the server are {tool.name!r}; leave out one of them"
                    )
                found[tool.name] = tool
        cursor = page.next_cursor
        if cursor is None:
            break
    if missing:
        raise RequestError(f"only: the server has no tool {', '.join(sorted(missing))}")
    return list(found.values())


def _tool(client: Client, one: Any) -> Tool:
    parameters = closed({"type": "object", "properties": {}, **one.input_schema})
    name = _OTHER.sub("_", one.name)[:_LONGEST]
    return Tool(name, one.description or one.title or "", parameters, _call(client, one.name))


def _call(client: Client, name: str) -> Callable[..., Coroutine[Any, Any, str]]:
    async def call(**arguments: Any) -> str:
        result = await client.call_tool(name, arguments)
        text = "\n".join(map(_text, result.content))
        if result.is_error:
            raise RuntimeError(text or "the tool failed without a message")
        return text

    return call


def _text(content: Any) -> str:
    """A part of a result. A model here reads text alone."""
    if content.type == "text":
        return str(content.text)
    if content.type == "resource" and hasattr(content.resource, "text"):
        return str(content.resource.text)
    if content.type == "resource_link":
        return f"[{content.name}: {content.uri}]"
    return f"[{content.type}: not shown]"
