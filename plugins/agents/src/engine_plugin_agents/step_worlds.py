"""Environments of worlds that answer each turn with an observation and a reward, and the rows that they give."""

from __future__ import annotations

import shutil
from functools import partial
from typing import TYPE_CHECKING, Any

from engine_core.errors import ConfigError
from engine_plugin_agents.calls import as_answer, find_tag
from engine_plugin_agents.policy import LimitReached
from engine_plugin_agents.world_process import WorldProcess, Worlds, ask_world

if TYPE_CHECKING:
    from engine_core.types import Rollout
    from engine_plugin_agents.episode import Episode


def check_python(where: str, python: str) -> None:
    """Refuse an interpreter that does not exist, with ConfigError.

    Args:
        where: the table, for the message.
        python: path or name; empty: the interpreter of the run.
    """
    if python and shutil.which(python) is None:
        raise ConfigError(
            f"{where}.python: there is no program '{python}'. Write the path of an interpreter."
        )


class StepEnvironment:
    """An environment whose episodes are those of a world. Subclasses set ``kind``.

    Args:
        python, processes, action_tag: see ``StepOptions``.
        world: the arguments of the ``World``.

    Raises:
        ConfigError: there is no such interpreter.
    """

    kind = ""

    def __init__(self, python: str, processes: int, action_tag: str, **world: Any) -> None:
        check_python(f"environment.{self.kind}", python)
        self._tag = action_tag
        self._worlds = Worlds(partial(WorldProcess, self.kind, python, world), processes)

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


def step_rows(
    kind: str, split: str, python: str, count: int, held_out: int, **world: Any
) -> list[dict[str, Any]]:
    """Return the rows of a data source: first observations and their seeds. Held-out seeds follow those of training.

    Args:
        kind: the world.
        split: ``train`` or ``validation``.
        python, count, held_out: see ``RowsOptions``.
        world: the arguments of the ``World``.

    Raises:
        ConfigError: the world cannot be used.
    """
    where = f"data.{kind}"
    check_python(where, python)
    first, number = (0, count) if split == "train" else (count, held_out)
    make = partial(WorldProcess, kind, python, world)
    rows: list[dict[str, Any]] = ask_world(make, where, "rows", count=number, first=first) if number else []
    return rows


gymnasium_rows = partial(step_rows, "gymnasium")
