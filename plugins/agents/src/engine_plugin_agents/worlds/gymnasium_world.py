"""Gymnasium environments whose observations and actions are texts or numbers; see ``worlds/__main__.py``."""

from __future__ import annotations

import re
import runpy
from typing import Any

import gymnasium
from gymnasium.spaces import Discrete, Text

DIGITS = 18
"""Of the longest number that is read: gymnasium compares numbers of 64 bits."""


class World:
    """All environments of one id in this process.

    Args:
        id: the registered id.
        arguments: keyword arguments of ``gymnasium.make``.
        register_file: a Python file that registers it; None: no file.

    Raises:
        TypeError: the actions are neither texts nor numbers.
    """

    def __init__(self, id: str, arguments: dict[str, Any], register_file: str | None) -> None:
        if register_file:
            runpy.run_path(register_file, run_name="register")
        self.id, self.arguments = id, arguments
        self.free: list[gymnasium.Env[Any, Any]] = []
        self.sessions: dict[int, gymnasium.Env[Any, Any]] = {}
        self.free.append(self._make())
        space = self.free[0].action_space
        if not isinstance(space, Text | Discrete):
            raise TypeError(f"{id} has actions of {type(space).__name__}; a turn can be of Text or Discrete")

    def _make(self) -> gymnasium.Env[Any, Any]:
        return gymnasium.make(self.id, **self.arguments)

    def rows(self, count: int) -> list[dict[str, Any]]:
        """Return the first observations of ``count`` seeds from 0."""
        [env] = self.free
        return [{"prompt": self._shown(env, env.reset(seed=s)[0]), "seed": s} for s in range(count)]

    def reset(self, session: int, row: dict[str, Any]) -> None:
        """Begin an episode with the seed of its row."""
        env = self.sessions[session] = self.free.pop() if self.free else self._make()
        env.reset(seed=int(row["seed"]))

    def step(self, session: int, text: str) -> dict[str, Any]:
        """Do an action; return the observation as text, the reward, and whether the episode is over."""
        env = self.sessions[session]
        action: Any = text
        if isinstance(env.action_space, Discrete):
            numbers = re.findall(r"-?\d+", text)
            action = int(numbers[-1]) if numbers and len(numbers[-1]) <= DIGITS else None
            if action is None or not env.action_space.contains(action):
                low = int(env.action_space.start)
                most = low + int(env.action_space.n) - 1
                return {
                    "text": f"error: an action is a number from {low} to {most}",
                    "reward": 0.0,
                    "done": False,
                }
        observation, reward, terminated, truncated, _ = env.step(action)
        shown = self._shown(env, observation)
        return {"text": shown, "reward": float(reward), "done": bool(terminated or truncated)}

    def close(self, session: int) -> None:
        """End an episode; its environment is used again."""
        if session in self.sessions:
            self.free.append(self.sessions.pop(session))

    def _shown(self, env: gymnasium.Env[Any, Any], observation: Any) -> str:
        return str(env.render() if env.render_mode == "ansi" else observation)
