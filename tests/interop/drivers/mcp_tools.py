"""Tools of a server of MCP, which runs in a process of its own, for ``arun_tools``; with pytest."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from mcp.server import MCPServer
from mcp_types import ImageContent

from sdk import LLM, RequestError, SamplingParams
from sdk.integrations.mcp import tools_of_server
from sdk.testing import FakeAnswer, FakeLLM

SERVER = Path(__file__).with_name("mcp_server.py")
ASK = [{"role": "user", "content": "What do two apples cost?"}]


def connected(use: Callable[[Client], Awaitable[Any]]) -> Any:
    """What ``use`` returns, with a client of the server."""

    async def run() -> Any:
        server = StdioServerParameters(command=sys.executable, args=[str(SERVER)])
        async with Client(server) as client:
            return await use(client)

    return asyncio.run(run())


def test_tools_are_those_of_the_server() -> None:
    tools = connected(tools_of_server)
    assert [tool.name for tool in tools] == ["price", "shop_hours"]
    assert tools[0].description.startswith("The price of an item.")
    assert tools[0].parameters["required"] == ["item"]
    assert tools[0].parameters["additionalProperties"] is False
    [one] = connected(lambda client: tools_of_server(client, only=["shop.hours"]))
    assert one.name == "shop_hours"


def test_a_model_calls_the_server_and_reads_results_and_errors() -> None:
    calls = [
        FakeAnswer(tool_calls=[("price", {"item": "apples", "count": 2}), ("shop_hours", {})]),
        FakeAnswer(tool_calls=[("price", {"item": "nothing"})]),
        "Six euros.",
    ]

    async def use(client: Client) -> Any:
        with FakeLLM(calls) as llm:
            return await llm.arun_tools(ASK, await tools_of_server(client))

    run = connected(use)
    said = [message["content"] for message in run.messages if message["role"] == "tool"]
    assert said[:2] == ["2 apples: 6 euros", "nine to six"]
    assert said[2].startswith("Error: ") and "this shop has no nothing" in said[2]
    assert run.output.content == "Six euros." and run.stopped == "answered"


def test_a_real_model_must_call_with_arguments_that_fit() -> None:
    async def use(client: Client) -> Any:
        tools = await tools_of_server(client, only=["price"])
        params = SamplingParams(temperature=0, max_tokens=64)
        with LLM(os.environ["CHAT_MODEL"], max_model_len=1024) as llm:
            return await llm.arun_tools(ASK, tools, params, tool_choice="required", max_turns=2)

    run = connected(use)
    [result] = [one["content"] for one in run.messages if one["role"] == "tool"]
    assert re.fullmatch(r"-?\d+ .*: -?\d+ euros", result, re.DOTALL)


def test_what_the_server_does_not_have_is_named() -> None:
    async def use(client: Client) -> None:
        with pytest.raises(RequestError, match=r"only: the server has no tool cost, sum"):
            await tools_of_server(client, only=["price", "sum", "cost"])

    connected(use)


def test_names_that_become_the_same_are_refused() -> None:
    server = MCPServer("twins")
    for name in ("a.b", "a/b"):
        server.tool(name=name)(lambda: "x")

    async def run() -> None:
        async with Client(server) as client:
            with pytest.raises(RequestError, match="two tools of the server are 'a_b'"):
                await tools_of_server(client)

    asyncio.run(run())


def test_what_is_not_text_is_said_to_be_left_out() -> None:
    server = MCPServer("pictures")

    @server.tool()
    def picture() -> list[ImageContent]:
        """A picture."""
        return [ImageContent(type="image", data="AAAA", mime_type="image/png")]

    async def run() -> str:
        async with Client(server) as client:
            [tool] = await tools_of_server(client)
            assert tool.function is not None
            return str(await tool.function())

    assert asyncio.run(run()) == "[image: not shown]"


def test_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = Path(os.environ["PAGE"]).parents[1].joinpath("tools.md").read_text(encoding="utf-8")
    section = text.split("## Tools of an MCP server\n")[1].split("\n## ")[0]
    [block] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (tmp_path / "model.gguf").symlink_to(os.environ["CHAT_MODEL"])
    (tmp_path / "server.py").write_text(SERVER.read_text())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    exec(compile(block, "tools.md", "exec"), {})
