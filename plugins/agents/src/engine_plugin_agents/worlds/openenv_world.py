"""Environments of OpenEnv, which run in a server; see ``worlds/__main__.py``."""

from __future__ import annotations

import json
from typing import Any

from openenv.core import GenericEnvClient


class World:
    """The sessions of one server.

    Args:
        url: address of the server.
        action: key of the action that holds the policy's text.
        observation: key of the observation that is shown; empty: the whole observation as JSON.
        arguments: further keys of each action.
    """

    def __init__(self, url: str, action: str, observation: str, arguments: dict[str, Any]) -> None:
        self.url, self.action, self.observation, self.arguments = url, action, observation, arguments
        self.sessions: dict[int, GenericEnvClient] = {}

    async def _connected(self) -> GenericEnvClient:
        client = GenericEnvClient(base_url=self.url, mode="simulation")
        await client.connect()
        return client

    async def rows(self, count: int) -> list[dict[str, Any]]:
        """Return the first observations of ``count`` seeds from 0."""
        client = await self._connected()
        try:
            return [
                {"prompt": self._shown((await client.reset(seed=seed)).observation), "seed": seed}
                for seed in range(count)
            ]
        finally:
            await client.disconnect()

    async def reset(self, session: int, row: dict[str, Any]) -> None:
        """Begin an episode with the seed of its row."""
        client = self.sessions[session] = await self._connected()
        await client.reset(seed=int(row["seed"]))

    async def step(self, session: int, text: str) -> dict[str, Any]:
        """Do an action; return the observation as text, the reward, and whether the episode is over."""
        result = await self.sessions[session].step({**self.arguments, self.action: text})
        shown = self._shown(result.observation)
        return {"text": shown, "reward": float(result.reward or 0.0), "done": bool(result.done)}

    async def close(self, session: int) -> None:
        """End an episode and its session in the server."""
        if session in self.sessions:
            await self.sessions.pop(session).disconnect()

    def _shown(self, observation: dict[str, Any]) -> str:
        if not self.observation:
            return json.dumps(observation)
        if self.observation not in observation:
            raise KeyError(f"the observation has no '{self.observation}', but {', '.join(observation)}")
        return str(observation[self.observation])
