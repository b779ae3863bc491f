"""Environments whose turns an existing agent program asks for: a *harness* talks to an endpoint of the OpenAI API.

A harness is a function (``endpoint``) or a command (the environment ``endpoint``). It receives a base URL and an API key.
With them, any client of the protocol reaches the policy. The harness needs no knowledge of Engine.
"""

from __future__ import annotations

import asyncio
import inspect
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from engine_core.errors import ConfigError, PluginError
from engine_plugin_agents.calls import limited
from engine_plugin_agents.commands import run_command
from engine_plugin_agents.policy import LimitReached

if TYPE_CHECKING:
    from engine_core.types import Rollout
    from engine_plugin_agents.episode import Episode
    from engine_plugin_agents.server import Session

SILENT = "the harness has ended and has not asked the policy. It must use the base URL and the API key that it is given"


class EndpointEnvironment:
    """An environment whose harness samples through the policy endpoint. Subclasses define ``harness``.

    Args:
        options: the options of the environment, which the harness receives.
    """

    harness: Callable[..., Any]
    """``harness(row=, base_url=, api_key=, **options)``, asynchronous or blocking; returns rewards by name, or None."""

    def __init__(self, **options: Any) -> None:
        from engine_plugin_agents.server import EndpointServer  # brings aiohttp

        self.options, self._server = options, EndpointServer()
        given = dict.fromkeys(("row", "base_url", "api_key", *options))
        try:
            inspect.signature(self.harness).bind(**given)
        except TypeError as error:
            name = getattr(self.harness, "__qualname__", repr(self.harness))
            shown = ", ".join(f"{argument}=" for argument in given)
            raise PluginError(
                f"The harness '{name}' must be callable as {name}({shown}): {error}."
            ) from error

    async def __call__(self, episode: Episode) -> Rollout:
        """Run the harness of one episode and return its conversations.

        Raises:
            LimitReached: the harness failed after no turn or token was left, or nothing was sampled for that reason.
            RuntimeError: the harness sent no request, or too many bad ones.
            Exception: the harness's.
        """
        await self._server.start()
        session = self._server.open(episode)
        try:
            rewards = await self._play(episode, session)
        except Exception as error:
            if session.limited:
                raise LimitReached(f"the harness needs more turns or tokens: {error}") from error
            raise
        finally:
            self._server.end(session)
            episode.branches = session.conversations.others()
        if not episode.policy.turns:
            raise LimitReached("the first request was too long") if session.limited else RuntimeError(SILENT)
        return episode.rollout(rewards)

    async def _play(self, episode: Episode, session: Session) -> Mapping[str, float | None]:
        call = partial(
            self.harness,
            row=_row(episode),
            base_url=f"{session.url}/v1",
            api_key=session.key,
            **self.options,
        )
        harness = asyncio.ensure_future(limited(call, episode.policy.limits.episode_seconds))
        try:
            await asyncio.wait({harness, session.ended}, return_when=asyncio.FIRST_COMPLETED)
            if session.ended.done():
                session.ended.result()
            rewards = harness.result()
        finally:
            harness.cancel()
        if not isinstance(rewards, Mapping | None):
            shown = f"{rewards!r:.60} ({type(rewards).__name__})"
            raise TypeError(f"a harness must return a dict of rewards by name, or None; it returned {shown}")
        return rewards or {}

    async def close(self) -> None:
        """Stop the server."""
        await self._server.close()


def endpoint(harness: Callable[..., Any]) -> type[EndpointEnvironment]:
    """Return the environment of a harness, for ``Environment(load=endpoint(solve), rewards=frozenset({"solved"}))``.

    Args:
        harness: called for each episode with the keywords ``row`` (the columns of the data and ``prompt``),
            ``base_url`` (ends with ``/v1``), ``api_key`` and the environment's options. A coroutine function, or a
            blocking function, which runs in a thread. It returns rewards by name, or None.
    """
    return type("EndpointEnvironment", (EndpointEnvironment,), {"harness": staticmethod(harness)})


class CommandEnvironment(EndpointEnvironment):
    """The environment ``endpoint``: each episode is a process of a command.

    Args:
        command: program and arguments.
        reward: see ``run_command``.

    Raises:
        ConfigError: the program is not installed.
    """

    harness = staticmethod(run_command)

    def __init__(self, command: Sequence[str], reward: str) -> None:
        if shutil.which(command[0]) is None:
            raise ConfigError(
                f"environment.endpoint.command: there is no program '{command[0]}'. Install it, or write its path."
            )
        super().__init__(command=command, reward=reward)


def _row(episode: Episode) -> dict[str, Any]:
    """Return the columns of the episode's row and its prompt as text: of a conversation, the last message."""
    prompt, columns = episode.prompt, episode.prompt.columns
    text = columns["messages"][-1]["content"] if columns.get("messages") else prompt.text
    return {"prompt": text, **columns}
