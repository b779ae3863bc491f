"""The policy endpoint without training: a sampler, its episodes' loop and the server, for ``engine serve`` and ``engine chat``."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import math
import socket
import sys
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from engine_core import load_config
from engine_core.cli.loading import chosen_checkpoint, read_run
from engine_core.config.assemble import plugins_for
from engine_core.contracts.runtime import Role
from engine_core.data import load_tokenizer
from engine_core.data.chat import ChatFormat
from engine_core.data.tokenizer import end_tokens
from engine_core.errors import ConfigError, DataError
from engine_core.runs.checkpoint import read_state
from engine_core.runs.tracking import RunFolder
from engine_core.sampler_session import SamplerSession
from engine_core.train.models import held_tokens, start_groups, text_config, warn_of_random_weights
from engine_core.types import Prompt, Request, Sampling
from engine_plugin_agents.conversations import RecentConversations
from engine_plugin_agents.episode import Episode
from engine_plugin_agents.event_loop import LoopThread
from engine_plugin_agents.policy import Limits, Policy
from engine_plugin_agents.reader import CallReader
from engine_plugin_agents.server import EndpointServer, Session
from engine_plugin_agents.session import EpisodeSession, Finished, Game

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_core.config import EngineConfig
    from engine_core.contracts.runtime import WorkerGroup
    from engine_core.plugins import PluginSet

LEAVE_SECONDS = 5.0


def read_target(
    target: str, step: str | None, sets: Sequence[str] | None
) -> tuple[EngineConfig, Path | None]:
    """Return the config of a model folder, a hub name or a run, and the checkpoint of the run.

    Args:
        target: model folder, hub name, or run.
        step: number of the checkpoint's step, or ``best``; None: the newest.
        sets: ``--set``.

    Raises:
        ConfigError: the target does not exist, or has no such checkpoint.
    """
    path = Path(target)
    is_hub_name = target.count("/") == 1 and not path.exists() and not path.parent.is_dir()
    if (path / "config.json").is_file() or is_hub_name:
        if step is not None:
            raise ConfigError(f"--step: '{target}' is no run, and only a run has checkpoints.")
        return load_config({"model.path": target}, overrides=list(sets or ())), None
    try:
        folder = RunFolder.open(target)
    except DataError as error:
        raise ConfigError(f"{error} A model is a folder with a config.json, or a hub name.") from error
    config = read_run(folder, ["trainer=rl", *(sets or ())])  # some trainers read no [rollout]
    try:
        return config, chosen_checkpoint(folder, step, config)
    except DataError as error:
        raise ConfigError(str(error)) from error


class Service:
    """A served model.

    Its sampling thread consumes: requests for turns; waits for: the loop of the server; unblocked by: requests,
    ``close``; produces: sampled turns.

    Args:
        config, checkpoint: result of ``read_target``.
        listener: a bound socket; None: a free port.

    Raises:
        EngineError: the model cannot be sampled, or has no chat template. Nothing is left running.
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Path | None = None, listener: socket.socket | None = None
    ) -> None:
        self._cleanup = ExitStack()
        try:
            self._start(config, checkpoint, EndpointServer(listener))
        except BaseException:
            self.close()
            raise

    def _start(self, config: EngineConfig, checkpoint: Path | None, server: EndpointServer) -> None:
        plugins, tokenizer = plugins_for(config), load_tokenizer(config.model)
        own = copy.deepcopy(tokenizer)  # the sampler uses the original concurrently
        chat = ChatFormat(own, config.data.control_tokens, config.data.chat_template_kwargs)
        chat.prompt([{"role": "user", "content": "a"}])  # refuses a tokenizer without a template
        self._runtime = plugins.resolve("runtimes", config.runtime.backend)(
            config, plugins, {"tokenizer": tokenizer}
        )
        self._cleanup.callback(self._runtime.close)
        group = self._group(config, plugins, checkpoint)
        environment = config.environment
        reader = CallReader(chat, plugins, environment.tool_format if environment else "auto")
        held = held_tokens(text_config(config.model, plugins), config.rollout.options)
        limits = Limits(sys.maxsize, held, math.inf, 0.0, 0)
        loop = LoopThread()
        self._cleanup.callback(loop.close)
        ready = Future[Session]()

        async def play(episode: Episode) -> None:
            """Serve until the episode is cancelled."""
            await server.start()
            session = server.open(episode)
            session.conversations = RecentConversations(episode)
            ready.set_result(session)
            await asyncio.Event().wait()

        def episode_of(request: Request, ask: Any) -> Episode:
            """Return the one episode, which keeps no turns."""
            policy = Policy(request, limits, ask, own)
            policy.turns = deque(maxlen=0)
            return Episode(policy, chat, reader)

        game = Game(play, "the endpoint", frozenset(), None, episode_of, _unexpected, math.inf)
        self._episodes = EpisodeSession(game, loop, SamplerSession(group))
        sampling = Sampling.of(config.rollout, log_probs=False)
        if not sampling.stop_token_ids:  # some chat models end a turn with another token than a text
            sampling = dataclasses.replace(sampling, stop_token_ids=end_tokens(config.model))
        self._episodes.submit([Request("0", Prompt("0", [], ""), sampling)])
        self._ended = Future[None]()
        thread = threading.Thread(target=self._sample, args=(ready,), daemon=True, name="engine-sampler")
        thread.start()
        self._cleanup.callback(thread.join)
        self._cleanup.callback(self._episodes.close)
        session = ready.result()
        self.url, self.key = session.url, session.key  #: address without a path, API key

        async def leave() -> None:
            """Refuse the requests in flight and stop the server."""
            server.end(session)
            await server.close()

        self._cleanup.callback(
            lambda: asyncio.run_coroutine_threadsafe(leave(), loop.loop).result(LEAVE_SECONDS)
        )

    def _group(self, config: EngineConfig, plugins: PluginSet, checkpoint: Path | None) -> WorkerGroup:
        """Start the sampler; with a checkpoint also the actor, which reads it and sends its weights."""
        roles = {"rollout": Role("rollout")}
        actor = config.actor
        if checkpoint or actor.lora or actor.path or plugins.overrides("engine_build_model"):
            roles = {"actor": Role("train", trainable=False), **roles}
        groups = start_groups(self._runtime, config, roles, 0)
        if checkpoint is not None:
            groups["actor"].call("load", folder=checkpoint / "actor").result()
            version = read_state(checkpoint)["trainer"].get("version", 0)
            self._runtime.push_weights("actor", "rollout", version)
        elif "actor" in groups:
            self._runtime.push_weights("actor", "rollout", 0)
        if checkpoint is None:
            warn_of_random_weights(config, plugins, roles)
        return groups["rollout"]

    def _sample(self, ready: Future[Session]) -> None:
        try:
            with self._runtime.phase("generate"):
                self._episodes.results()
            self._ended.set_result(None)
        except BaseException as error:
            self._ended.set_exception(error)
            if ready.done():  # requests in flight would wait without end
                self._episodes.loop.post(ready.result().close)
            else:
                ready.set_exception(error)

    def wait(self) -> None:
        """Wait until the sampling ends, which only an error or ``close`` brings about.

        Raises:
            EngineError: the sampler has failed.
        """
        self._ended.result()  # after an interrupted Thread.join of Python 3.11, a second one does not wait

    def check(self) -> None:
        """Raise the error of the sampler, if it has failed."""
        if self._ended.done():
            self._ended.result()

    def close(self) -> None:
        """Stop the server, the sampler and the model."""
        self._cleanup.close()


def _unexpected(finished: Finished) -> NoReturn:
    raise RuntimeError(f"The endpoint has ended: {finished.message}\n{finished.trace}")
