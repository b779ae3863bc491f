"""The environment ``verifiers``: environments of that library, whose agents talk to the policy endpoint."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from engine_plugin_agents.policy_endpoint import EndpointEnvironment
from engine_plugin_agents.world_process import WorldProcess, Worlds, check_python


class VerifiersEnvironment(EndpointEnvironment):
    """An environment of verifiers: its harness runs the library's episode in another process.

    Args:
        python, processes, variables: see ``WorldOptions``.
        world: the arguments of the ``World``.

    Raises:
        ConfigError: there is no such interpreter.
    """

    def __init__(self, python: str, processes: int, variables: Iterable[str] = (), **world: Any) -> None:
        check_python("environment.verifiers", python)
        self._worlds = Worlds(partial(WorldProcess, "verifiers", python, world, variables), processes)
        super().__init__()

    async def harness(self, row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, float]:
        """Run an episode of the row's task; return its reward.

        Raises:
            WorldError: the library's episode failed, or its process has ended.
        """
        async with self._worlds.session(None) as call:  # the episode has a time limit
            scores: dict[str, float] = await call(
                "play", row={"task": row["task"]}, base_url=base_url, api_key=api_key
            )
        return scores

    async def close(self) -> None:
        """Stop the server and the processes."""
        await self._worlds.close()
        await super().close()
