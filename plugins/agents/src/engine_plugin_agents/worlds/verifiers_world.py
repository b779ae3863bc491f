"""Environments of ``verifiers`` 0.4, whose agents talk to the policy endpoint; see ``worlds/__main__.py``."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.clients import EvalClient, TrainClientConfig, resolve_client
from verifiers.v1.configs.env import EnvConfig
from verifiers.v1.env import Env
from verifiers.v1.interception import server
from verifiers.v1.utils import loaders
from verifiers.v1.utils.generic import concrete_type

KEY = "ENGINE_API_KEY_"  # variable of the key of an episode, with the number of its slot


class SlotClient(EvalClient):
    """A client whose key is that of the present episode in a slot.

    The library keeps a client for each config until it ends: a config for each episode would fill the memory.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.variable = config.api_key_var

    @property
    def api_key(self) -> str:
        """The key of the present episode."""
        return os.environ[self.variable]

    @api_key.setter
    def api_key(self, key: str) -> None:
        """Ignore the key of the first episode."""


def _client(config: Any) -> Any:
    ours = not isinstance(config, TrainClientConfig) and config.api_key_var.startswith(KEY)
    return SlotClient(config) if ours else resolve_client(config)


server.resolve_client = _client


class World:
    """An environment of verifiers, for all episodes of this process.

    Args:
        taskset: the id of a taskset.
        settings: other keys of the environment's config.
        folder: a folder with modules of tasksets and harnesses; None: no folder.
    """

    def __init__(self, taskset: str, settings: dict[str, Any], folder: str | None) -> None:
        if folder:
            sys.path.insert(0, folder)
        given = {**settings, "taskset": {**settings.get("taskset", {}), "id": taskset}}
        kind = loaders.environment_class(taskset, given.get("id", ""))
        config = concrete_type(kind, EnvConfig, origin=Env) or EnvConfig
        if "agent" in config.model_fields:  # the library's default is a cloud service
            given["agent"] = {"runtime": {"type": "subprocess"}, **given.get("agent", {})}
        self.env = loaders.load_environment(config.model_validate(given))
        self.waiting = iter(self.env.taskset)
        self.tasks: list[Any] = []
        self.free: list[int] = []  # slots, of which there are as many as episodes at the same time
        self.slots = 0
        self.serving: asyncio.Future[None] | None = None

    def _upto(self, count: int) -> list[Any]:
        self.tasks += itertools.islice(self.waiting, max(0, count - len(self.tasks)))
        return self.tasks

    def rows(self, count: int) -> list[dict[str, Any]]:
        """Return the prompts of the first ``count`` tasks; fewer if there are no more."""
        chosen = self._upto(count)[:count]
        return [{"prompt": task.data.prompt_text or "-", "task": task.data.idx} for task in chosen]

    async def play(self, session: int, row: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
        """Run an episode whose agents are the policy; return its reward, the mean over its agents.

        Raises:
            RuntimeError: the episode failed.
        """
        if self.serving is None:
            self.serving = asyncio.get_running_loop().create_future()
            self.task = asyncio.ensure_future(self._serve(self.serving))
        await asyncio.shield(self.serving)
        if not self.free:
            self.free.append(self.slots)
            self.slots += 1
        slot = self.free.pop()
        variable = f"{KEY}{slot}"
        os.environ[variable] = api_key
        try:
            client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
            index = int(row["task"])
            episode = await self.env.run_episode(
                self._upto(index + 1)[index], vf.ModelContext(model="policy", client=client)
            )
        finally:
            os.environ[variable] = "ended"
            self.free.append(slot)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok:
            raise RuntimeError(f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed")
        return {"score": sum(trace.reward for trace in episode.traces) / len(episode.traces)}

    async def _serve(self, ready: asyncio.Future[None]) -> None:
        """Hold the servers that episodes share until the process ends."""
        try:
            async with self.env.serving():
                ready.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)

    def close(self, session: int) -> None:
        """End an episode; it holds nothing."""
