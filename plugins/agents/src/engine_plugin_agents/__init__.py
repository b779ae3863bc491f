"""Environments: rollouts of several turns, with tools or simulated users between them.

An environment is ``async def f(episode, **options) -> Rollout``: it samples turns of the policy, appends
what answers them, and gives the rollout. All episodes of a step run at once on one asyncio loop, in a
thread of the controller; the controller's main thread answers their samples by the rollout engine, so an
episode that waits for a tool holds up no other.

Tokens are never encoded again: what the policy sampled stays as it was sampled, what answers it is
encoded once and appended. That a returned rollout keeps to it is checked.

Left out: running code that nobody trusts. Episodes live in the controller's process.
"""

from engine_plugin_agents.calls import ToolCall, find_tag, json_calls
from engine_plugin_agents.episode import Episode, LimitReached
from engine_plugin_agents.policy import Turn

__all__ = ["Episode", "LimitReached", "ToolCall", "Turn", "find_tag", "json_calls"]
