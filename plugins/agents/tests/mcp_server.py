"""An MCP server of the package ``mcp``: ``python mcp_server.py`` (stdio) or ``python mcp_server.py PORT`` (HTTP)."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("test")
total = 0


@server.tool()
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


@server.tool()
def count() -> str:
    """Count the calls of this tool in this process."""
    global total
    total += 1
    return f"{total} {os.environ.get('GIVEN', '')} {os.environ.get('HIDDEN', '')}"


@server.tool()
def fail(text: str) -> str:
    """Fail."""
    raise ToolError(text)


@server.tool()
def empty() -> str:
    """Answer nothing."""
    return ""


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
async def hang() -> str:
    """Answer too late."""
    time.sleep(3)
    return "late"


@server.tool()
def flood(megabytes: int) -> str:
    """Answer at length."""
    return "a\x00\x1b[2J" + "x" * 1_000_000 * megabytes


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
