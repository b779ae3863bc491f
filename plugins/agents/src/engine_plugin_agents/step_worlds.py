"""Environments of worlds that answer each turn with an observation and a reward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
            LimitReached: the limits ended the episode before the world did.
        """
        score = 0.0
        async with self._worlds.session(episode.policy.limits.tool_seconds) as call:
            await call("reset", row={"seed": episode.prompt.columns["seed"]})
            try:
                while True:
                    state = await self._step(episode, call)
                    score += state["reward"]
                    if state["done"]:
                        return episode.rollout({"score": score})
                    _observe(episode, state["text"])
            except LimitReached as error:
                raise LimitReached(str(error), {"score": score}) from error

    async def _step(self, episode: Episode, call: Callable[..., Any]) -> dict[str, Any]:
        """Sample a turn; return the state of the world after its action."""
        turn = await episode.sample()
        text = episode.tokenizer.decode(turn.token_ids, skip_special_tokens=True)
        action = find_tag(text, self._tag) if self._tag else text
        if action is None:
            return {"text": f"error: no <{self._tag}> in the turn", "reward": 0.0, "done": False}
        state: dict[str, Any] = await call("step", text=action)
        return state

    async def close(self) -> None:
        """End the world's processes."""
        await self._worlds.close()


class GymnasiumEnvironment(StepEnvironment):
    """The environment ``gymnasium``."""

    kind = "gymnasium"


class OpenEnvEnvironment(StepEnvironment):
    """The environment ``openenv``."""

    kind = "openenv"


def _observe(episode: Episode, text: str) -> None:
    """Append an observation; raise ``LimitReached`` if the policy cannot answer it."""
    if not episode.goes_on:
        raise LimitReached("no turn or token is left")
    observation = as_answer(text, episode.policy.limits.tool_characters)
    if "messages" in episode.prompt.columns:
        episode.append_messages({"role": "user", "content": observation})
    else:
        episode.append(observation, "user")
