"""A server of MCP over standard input and output, for tests."""

from __future__ import annotations

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("shop")


@server.tool()
def price(item: str, count: int = 1) -> str:
    """The price of an item.

    Args:
        item: What is bought.
    """
    if item == "nothing":
        raise ToolError("this shop has no nothing")
    return f"{count} {item}: {count * 3} euros"


@server.tool(name="shop.hours")
def hours() -> str:
    """When the shop is open."""
    return "nine to six"


if __name__ == "__main__":
    server.run("stdio")
