"""The environment ``tools``: the policy calls tools that the run file names."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from engine_core.errors import ConfigError
from engine_plugin_agents.mcp_tools import McpTools, listed_schemas
from engine_plugin_agents.policy import LimitReached
from engine_plugin_agents.sandbox_tools import SandboxTool, sandbox_schema, sandbox_tier
from engine_plugin_agents.tool_options import McpServer, ToolsOptions

if TYPE_CHECKING:
    from engine_core.types import Rollout
    from engine_plugin_agents.episode import Episode

Tools = Mapping[str, Callable[..., Any]]


def tool_schemas(options: ToolsOptions) -> tuple[Mapping[str, Any], ...]:
    """Return the JSON schemas of the tools that a run names, for ``Environment(tools=tool_schemas)``.

    Raises:
        ConfigError: an MCP server cannot be used, or two tools have one name.
    """
    schemas = [sandbox_schema(kind) for kind in options.tools]
    owners = dict.fromkeys(options.tools, "tools")
    for server, offered in _offered(options.model_dump_json(include={"mcp"})).items():
        for schema in offered:
            name = schema["function"]["name"]
            if name in owners:
                raise ConfigError(
                    f"environment.tools.mcp.{server} offers a tool '{name}', a name that {owners[name]} has already. "
                    "Name the tools that you need in its key only."
                )
            owners[name] = f"mcp.{server}"
        schemas += offered
    return tuple(schemas)


@functools.cache
def _offered(options: str) -> dict[str, tuple[dict[str, Any], ...]]:
    """Return the schemas of the tools by MCP server; the servers are asked once in a process."""
    servers = {name: McpServer.model_validate(table) for name, table in json.loads(options)["mcp"].items()}
    return listed_schemas(servers) if servers else {}


class ToolEnvironment:
    """An environment with the tools of ``[environment.tools]``. Subclasses may define ``play``, for example to set rewards.

    Args:
        options: the fields of ``ToolsOptions``.

    Raises:
        ConfigError: a tool needs a package that is not installed, or an MCP server cannot be used.
        EnvironmentProblem: this machine's sandbox is weaker than a tool needs.
    """

    def __init__(self, **options: Any) -> None:
        self.options = ToolsOptions.model_validate(options)
        self.tier = sandbox_tier(self.options) if self.options.tools else ""
        tool_schemas(self.options)  # two tools of one name are refused
        self._servers = {name: McpTools(name, server) for name, server in self.options.mcp.items()}
        self._shared = {
            schema["function"]["name"]: self._servers[name].function(schema["function"]["name"])
            for name, offered in _offered(self.options.model_dump_json(include={"mcp"})).items()
            for schema in offered
        }

    async def __call__(self, episode: Episode) -> Rollout:
        """Run an episode; its tools end with it."""
        async with AsyncExitStack() as ends:
            tools: dict[str, Callable[..., Any]] = {**self._shared}
            for kind in self.options.tools:
                tool = SandboxTool(kind, self.tier, self.options, episode.policy.limits.episode_seconds)
                ends.callback(tool.close)
                tools[kind] = tool.function
            return await self.play(episode, tools)

    async def close(self) -> None:
        """End the connections to MCP servers."""
        await asyncio.gather(*(server.close() for server in self._servers.values()))

    async def play(self, episode: Episode, tools: Tools) -> Rollout:
        """Sample turns and answer their calls, until a turn has none.

        Args:
            episode: the episode.
            tools: the tools' functions by name.

        Raises:
            LimitReached: the last turn that the limits allow has calls.
        """
        turn = await episode.sample()
        while episode.goes_on and await episode.answer_calls(turn, tools):
            turn = await episode.sample()
        if episode.tool_calls(turn):
            raise LimitReached("the calls of the last turn are not answered")
        return episode.rollout()
