"""Tools of MCP servers, for all episodes of a run.

A run has one connection to each server, made at the first call. A lost connection is made again at the next call: a
command is started again. Calls of several episodes run at the same time.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from engine_core.errors import ConfigError, did_you_mean
from engine_plugin_agents.child import LINE_BYTES, kill_child, last_words, shorten, start_child

if TYPE_CHECKING:
    from mcp import Client

    from engine_plugin_agents.tool_options import McpServer

START_SECONDS = 60.0
CLOSE_SECONDS = 10.0


class ToolError(Exception):
    """An error that a tool of a server reported, or the loss of the server."""


class Connection:
    """A connection to a server, held by a task.

    consumes: calls of ``client``; waits for: ``close``; unblocked by: the end of the server; produces: results.

    Args:
        name: the server, for messages.
        server: its table.
    """

    def __init__(self, name: str, server: McpServer) -> None:
        self.name, self.server = name, server
        self.client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self.client.add_done_callback(lambda client: client.cancelled() or client.exception())
        self.lost = False
        self.why = "has ended"
        self._over = asyncio.Event()
        self._task = asyncio.ensure_future(self._hold())

    async def _hold(self) -> None:
        """Connect, and stay in the task that has connected, as the library requires, until the end."""
        from mcp import Client

        with tempfile.TemporaryFile() as errors:
            try:
                async with asyncio.timeout(START_SECONDS) as limit, Client(self._transport(errors)) as client:
                    limit.reschedule(None)
                    self.client.set_result(client)
                    await self._over.wait()
            except BaseException as error:
                self.lost = True
                if not self.client.done():
                    self.client.set_exception(ToolError(self._problem(error, errors)))
                if isinstance(error, asyncio.CancelledError):
                    raise

    def _transport(self, errors: Any) -> Any:
        return self.server.url or _started(self, errors)

    def _problem(self, error: BaseException, errors: Any) -> str:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, TimeoutError):
            return f"MCP server '{self.name}' did not answer within {START_SECONDS:g} s"
        said = last_words(errors)
        return f"MCP server '{self.name}' cannot be used: {type(error).__name__}: {error}. {said}".rstrip(
            ". "
        )

    async def close(self) -> None:
        """End the connection, and the server if it is a command."""
        self._over.set()
        await asyncio.wait({self._task}, timeout=CLOSE_SECONDS)
        self._task.cancel()


@contextlib.asynccontextmanager
async def _started(connection: Connection, errors: Any) -> AsyncGenerator[Any, None]:
    """Start a command and yield the streams of its messages; kill it and its children at the end.

    Unlike the transport of the library, it reads a long line in linear time and up to a limit, and kills at once.
    """
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    server = connection.server
    process = await start_child(server.command, server.variables, errors)
    received, incoming = anyio.create_memory_object_stream[Any](0)
    outgoing, sent = anyio.create_memory_object_stream[Any](0)

    async def next_line() -> bytes:
        """Return the next line; empty at the end of the output, or if the line is too long."""
        assert process.stdout
        try:
            return await process.stdout.readline()
        except ValueError:
            connection.why = f"sent more than {LINE_BYTES // 2**20} MiB at once"
            return b""

    async def read() -> None:
        """Deliver messages until the output ends or a line is too long."""
        async with received:
            with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                while line := await next_line():
                    shorten(errors)
                    try:
                        message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                    except ValueError as error:  # the library reports it
                        await received.send(error)
                    else:
                        await received.send(message)

    async def write() -> None:
        """Write messages until the input is closed."""
        assert process.stdin
        with contextlib.suppress(OSError):  # the end of the output says that the server has ended
            async for each in sent:
                process.stdin.write(
                    each.message.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
                )
                await process.stdin.drain()

    tasks = [asyncio.ensure_future(read()), asyncio.ensure_future(write())]
    try:
        yield incoming, outgoing
    finally:
        for task in tasks:
            task.cancel()
        for stream in (received, incoming, outgoing, sent):
            stream.close()
        await asyncio.gather(*tasks, kill_child(process), return_exceptions=True)


class McpTools:
    """The tools of one server.

    Args:
        name: the server's name in the run file.
        server: its table.
    """

    def __init__(self, name: str, server: McpServer) -> None:
        self.name, self.server = name, server
        self._connection: Connection | None = None

    def function(self, tool: str) -> Callable[..., Any]:
        """Return the function of a tool, for ``episode.answer_calls``."""

        async def call(**arguments: Any) -> str:
            """Call the tool and return its text."""
            return await self._call(tool, arguments)

        call.__name__ = tool
        return call

    async def _connected(self) -> Connection:
        """Return the connection, made again if it was lost.

        Raises:
            ToolError: the server cannot be reached.
        """
        if self._connection is None or self._connection.lost:
            self._connection = Connection(self.name, self.server)
        connection = self._connection
        await asyncio.shield(connection.client)  # others wait for it as well
        return connection

    async def _call(self, tool: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool.

        Raises:
            ToolError: the tool reports an error, or the server was lost.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST

        connection = await self._connected()
        try:
            result = await connection.client.result().call_tool(tool, dict(arguments))
        except MCPError as error:
            ended = error.code == INVALID_REQUEST and "session" in error.message.lower()
            if error.code == CONNECTION_CLOSED or (self.server.url and ended):
                connection.lost = True
                await connection.close()
                raise ToolError(
                    f"MCP server '{self.name}' {connection.why}; the next call starts it again"
                ) from error
            raise ToolError(error.message) from error
        parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        if result.is_error:
            raise ToolError("\n".join(parts))
        return "\n".join(parts) or "[no output]"

    async def schemas(self) -> tuple[dict[str, Any], ...]:
        """Return the JSON schemas of the tools that the run uses, in the server's order.

        Raises:
            ToolError: the server cannot be reached.
            ConfigError: it has no tool of a name in ``only``.
        """
        client, tools, cursor = (await self._connected()).client.result(), [], None
        while True:
            page = await asyncio.wait_for(client.list_tools(cursor=cursor), START_SECONDS)
            tools += page.tools
            if not (cursor := page.next_cursor):
                break
        names, only = [tool.name for tool in tools], self.server.only
        for name in only:
            if name not in names:
                raise ConfigError(
                    f"environment.tools.mcp.{self.name}.only: the server has no tool '{name}'.{did_you_mean(name, names)}"
                )
        return tuple(
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description or "",
                    "parameters": tool.input_schema,
                },
            }
            for tool in tools
            if not only or tool.name in only
        )

    async def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            await self._connection.close()


def listed_schemas(servers: Mapping[str, McpServer]) -> dict[str, tuple[dict[str, Any], ...]]:
    """Start all servers, ask for their tools, and end them; return the JSON schemas by server.

    Raises:
        ConfigError: a server cannot be used.
    """

    async def ask(name: str) -> tuple[dict[str, Any], ...]:
        """Return the schemas of one server.

        Raises:
            ConfigError: it cannot be used.
        """
        tools = McpTools(name, servers[name])
        try:
            return await tools.schemas()
        except ConfigError:
            raise
        except Exception as error:
            said = str(error) if isinstance(error, ToolError) else f"{type(error).__name__}: {error}"
            raise ConfigError(f"environment.tools.mcp.{name}: {said}.") from error
        finally:
            await tools.close()

    async def ask_all() -> list[tuple[dict[str, Any], ...]]:
        """Return the schemas of each server."""
        return await asyncio.gather(*map(ask, servers))

    for name, server in servers.items():
        if server.command and shutil.which(server.command[0]) is None:
            raise ConfigError(
                f"environment.tools.mcp.{name}.command: there is no program '{server.command[0]}'. Install it, or write its path."
            )
    try:
        import mcp  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            "environment.tools.mcp needs the package mcp, which is not installed. Try: pip install 'engine-plugin-agents[mcp]'"
        ) from error
    with ThreadPoolExecutor(1) as thread:  # this thread may have a loop that runs
        return dict(zip(servers, thread.submit(asyncio.run, ask_all()).result(), strict=True))
