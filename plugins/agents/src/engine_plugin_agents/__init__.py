"""Environments: rollouts of several turns, with tools or simulated users between them.

An environment is ``async def f(episode, **options) -> Rollout``. It samples turns of the policy, appends the answers to
them, and returns the rollout. All episodes run concurrently on one asyncio loop, in a thread of the controller. Another
thread samples their turns with the rollout engine, so an episode that waits for a tool does not delay the others.

Tokens are never encoded again: sampled tokens stay as sampled, and answers are encoded once and appended. The engine
checks that a returned rollout obeys this.

Not supported: untrusted code. Episodes run in the controller's process.
"""

from engine_plugin_agents.calls import ToolCall, find_tag
from engine_plugin_agents.episode import Episode, LimitReached
from engine_plugin_agents.policy import Turn
from engine_plugin_agents.policy_endpoint import EndpointEnvironment, endpoint
from engine_plugin_agents.tables import ToolFormat
from engine_plugin_agents.tool_environment import ToolEnvironment, tool_schemas
from engine_plugin_agents.tool_options import ToolsOptions

__all__ = [
    "EndpointEnvironment",
    "Episode",
    "LimitReached",
    "ToolCall",
    "ToolEnvironment",
    "ToolFormat",
    "ToolsOptions",
    "Turn",
    "endpoint",
    "find_tag",
    "tool_schemas",
]
