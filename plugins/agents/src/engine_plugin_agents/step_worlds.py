"""Environments of worlds that answer each turn with an observation and a reward."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from engine_plugin_agents.calls import as_answer, find_tag
from engine_plugin_agents.policy import LimitReached
from engine_plugin_agents.world_process import WorldProcess, Worlds, check_python

if TYPE_CHECKING:
    from engine_core.types import Rollout
    from engine_plugin_agents.episode import Episode


class StepEnvironment:
    """An environment whose episodes are those of a world. Subclasses set ``kind``.

    Args:
        python, processes, action_tag, variables: see ``StepOptions``.
        world: the arguments of the ``World``.

    Raises:
        ConfigError: there is no such interpreter.
    """

    kind = ""

    def __init__(
        self, python: str, processes: int, action_tag: str, variables: Iterable[str] = (), **world: Any
    ) -> None:
        check_python(f"environment.{self.kind}", python)
        self._tag = action_tag
        self._worlds = Worlds(partial(WorldProcess, self.kind, python, world, variables), processes)

    async def __call__(self, episode: Episode) -> Rollout:
        """Run an episode: the sum of the world's rewards is the reward ``score``.

        Raises:
            WorldError: the world failed; the episode follows `environment.on_error`.
        """
        total = 0.0
        limits = episode.policy.limits
        async with self._worlds.session(limits.tool_seconds) as call:
            columns = episode.prompt.columns
            await call("reset", row={"seed": columns["seed"]})
            while True:
                turn = await episode.sample()
                text = episode.tokenizer.decode(turn.token_ids, skip_special_tokens=True)
                action = find_tag(text, self._tag) if self._tag else text
                state: dict[str, Any]
                if action is None:
                    state = {"text": f"error: no <{self._tag}> in the turn", "reward": 0.0, "done": False}
                else:
                    state = await call("step", text=action)
                total += state["reward"]
                if state["done"] or not episode.goes_on:
                    break
                observation = as_answer(state["text"], limits.tool_characters)
                try:
                    if "messages" in columns:
                        episode.append_messages({"role": "user", "content": observation})
                    else:
                        episode.append(observation, "user")
                except LimitReached:
                    break
        return episode.rollout({"score": total})

    async def close(self) -> None:
        """End the world's processes."""
        await self._worlds.close()


class GymnasiumEnvironment(StepEnvironment):
    """The environment ``gymnasium``."""

    kind = "gymnasium"


class OpenEnvEnvironment(StepEnvironment):
    """The environment ``openenv``."""

    kind = "openenv"
