"""The environment ``tools``: the policy calls tools that the run file names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from engine_plugin_agents.sandbox_tools import SandboxTool, sandbox_schema, sandbox_tier
from engine_plugin_agents.tool_options import ToolsOptions

if TYPE_CHECKING:
    from engine_core.types import Rollout
    from engine_plugin_agents.episode import Episode

Tools = Mapping[str, Callable[..., Any]]


def tool_schemas(options: ToolsOptions) -> tuple[Mapping[str, Any], ...]:
    """Return the JSON schemas of the tools that a run names, for ``Environment(tools=tool_schemas)``."""
    return tuple(sandbox_schema(kind) for kind in options.tools)


class ToolEnvironment:
    """An environment with the tools of ``[environment.tools]``. Subclasses may define ``play``, for example to set rewards.

    Args:
        options: the fields of ``ToolsOptions``.

    Raises:
        ConfigError: a tool needs a package that is not installed.
        EnvironmentProblem: this machine's sandbox is weaker than a tool needs.
    """

    def __init__(self, **options: Any) -> None:
        self.options = ToolsOptions.model_validate(options)
        self.tier = sandbox_tier(self.options) if self.options.tools else ""

    async def __call__(self, episode: Episode) -> Rollout:
        """Run an episode; its tools end with it."""
        async with AsyncExitStack() as ends:
            tools = dict[str, Callable[..., Any]]()
            for kind in self.options.tools:
                tool = SandboxTool(kind, self.tier, self.options, episode.policy.limits.episode_seconds)
                ends.callback(tool.close)
                tools[kind] = tool.function
            return await self.play(episode, tools)

    async def play(self, episode: Episode, tools: Tools) -> Rollout:
        """Sample turns and answer their calls, until a turn has none or the limits are reached.

        Args:
            episode: the episode.
            tools: the tools' functions by name.
        """
        turn = await episode.sample()
        while episode.goes_on and await episode.answer_calls(turn, tools):
            turn = await episode.sample()
        return episode.rollout()
