"""The environment of a run: it plays episodes and applies failure policies."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from engine_core.config.models import DataConfig
from engine_core.data.chat import ChatFormat
from engine_core.errors import TrainingFailed
from engine_core.sampler_session import SamplerSession
from engine_plugin_agents.checks import check_columns, check_reward_names, check_tools, load_environment
from engine_plugin_agents.episode import Episode
from engine_plugin_agents.event_loop import LoopThread
from engine_plugin_agents.policy import Ask, Limits, Policy
from engine_plugin_agents.reader import CallReader
from engine_plugin_agents.session import EpisodeSession, Finished, Game

if TYPE_CHECKING:
    from engine_core.config.models import EnvironmentConfig
    from engine_core.contracts.runtime import WorkerGroup
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.specs import Environment
    from engine_core.timeline import Clock
    from engine_core.types import Request, Rollout

TRACES_LOGGED = 20
COUNTS = (
    "environment/errors",
    "environment/timeouts",
    "environment/truncated",
    "environment/tool_calls",
    "environment/tool_errors",
    "environment/tool_timeouts",
)
PHASES = {
    "time/episode_sampling": "sampling",
    "time/episode_tool": "tool",
    "time/episode_waiting": "waiting",
}
ENDPOINT_COUNTS = ("environment/branches", "environment/reencoded_tokens")

HELD_OUT = "0:"
"""Beginning of the ids of requests outside of training, which belong to no step."""

log = logging.getLogger("engine")


class EnvironmentRunner:
    """The environment of one run.

    Args:
        config: the ``[environment]`` table.
        plugins: the run's plugins, one of which offers the environment.
        tokenizer: the run's tokenizer.
        max_tokens: maximum sequence length of the model.
        columns: names of the data's columns.
        rewards: names in ``[[reward]]``.
        data: the ``[data]`` table, whose keys of chat templates also apply to messages of episodes.

    Raises:
        EngineError: the environment cannot be used; nothing was sampled.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        plugins: PluginSet,
        tokenizer: Any,
        max_tokens: int,
        columns: Collection[str],
        rewards: Collection[str] = (),
        data: DataConfig | None = None,
    ) -> None:
        self.config = config
        self.tokenizer = copy.deepcopy(tokenizer)  # a copy: the sampler uses the original concurrently
        data = data or DataConfig()
        self.chat = ChatFormat(self.tokenizer, data.control_tokens, data.chat_template_kwargs)
        self.spec: Environment = plugins.spec("environments", config.name)  # type: ignore[assignment]
        check_reward_names(config, self.spec, rewards)
        self.check_columns(columns)
        self.play, self.label = load_environment(config, plugins)
        tools = self.spec.tools(config.options) if callable(self.spec.tools) else self.spec.tools
        check_tools(self.label, tools, self.chat, bool(data.columns.tools))
        self.reader = CallReader(self.chat, plugins, config.tool_format)
        self.limits = Limits(
            config.max_turns,
            min(config.max_tokens or max_tokens, max_tokens),
            config.timeout_seconds,
            config.tool_timeout_seconds,
            config.max_tool_characters,
        )
        self.loop: LoopThread | None = None  # from the first session on
        self.clock: Clock | None = None  # of a sampler that does nothing else; None: that of the machine
        self._counts: dict[bool, Counter[str]] = {False: Counter(), True: Counter()}  # by whether held out
        self._seconds: dict[bool, list[Mapping[str, float]]] = {
            False: [],
            True: [],
        }  # by phase of each episode
        self._last_failure = ""
        self._logged: set[str] = set()

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weights of the rewards that episodes set, by name."""
        return {name: self.config.reward_weights.get(name, 1.0) for name in sorted(self.spec.rewards)}

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse data that lacks a column which the environment needs, with ``DataError``."""
        check_columns(self.config, self.spec, columns)

    def session(self, turns: SamplerSession) -> EpisodeSession:
        """Return a session whose requests are episodes.

        Args:
            turns: samples the turns, and nothing else.
        """
        self.loop = self.loop or LoopThread()
        most, rewards = self.config.max_concurrent, self.spec.rewards
        slots = asyncio.Semaphore(most) if most else None
        seconds = self.config.timeout_seconds
        game = Game(self.play, self.label, rewards, slots, self._episode, self._ended, seconds)
        return EpisodeSession(game, self.loop, turns)

    def stream(self, group: WorkerGroup, requests: Sequence[Request]) -> Generator[list[Rollout], None, None]:
        """Play one episode for each request with a sampler that does nothing else.

        Args:
            group: the rollout engine.
            requests: one per episode, with the seed and sampling parameters of its first turn.

        Yields:
            Rollouts of episodes that have ended. A failed episode gives its partial rollout with ``failure`` set; it
            is not ``valid`` if its failure policy is ``drop``.

        Raises:
            TrainingFailed: a failure policy requires it, or the environment blocks the loop.
            PluginError: the environment's return value is no rollout of its episode.
        """
        # in rounds, so that samplers get the turns of fast tools together
        session = self.session(SamplerSession(group, self.clock, rounds=True))
        session.submit(requests)
        try:
            while not session.idle:
                yield session.results()
        finally:  # also at a stop: leave no request of this step in the sampler
            session.abandon()
            session.close()

    def check_failures(self, rollouts: Sequence[Rollout]) -> None:
        """Refuse the rollouts of a step if too many episodes have failed.

        Raises:
            TrainingFailed: a larger share than `max_failure_share` has failed.
        """
        failures, share = sum(bool(rollout.failure) for rollout in rollouts), self.config.max_failure_share
        if failures > share * len(rollouts):
            raise TrainingFailed(
                f"{self.label} failed in {failures} of {len(rollouts)} episodes, more than "
                f"environment.max_failure_share = {share:g} allows. Last: {self._last_failure}. "
                "The weights were left alone."
            )

    def metrics(self, held_out: bool = False) -> dict[str, float]:
        """Return and reset the metrics of the episodes that have ended since the previous call.

        Args:
            held_out: those outside of training, instead of those of steps.
        """
        counts, self._counts[held_out] = self._counts[held_out], Counter()
        names = (*COUNTS, *(name for name in ENDPOINT_COUNTS if name.partition("/")[2] in counts))
        counted = {name: float(counts[name.partition("/")[2]]) for name in names}
        seconds, self._seconds[held_out] = self._seconds[held_out], []
        if seconds:
            counted["environment/turns"] = counts["turns"] / len(seconds)
            if not held_out:  # an evaluation is repeated exactly
                counted |= {name: fmean(each[phase] for each in seconds) for name, phase in PHASES.items()}
        if counts["tool_calls"]:
            failed = counts["tool_errors"] + counts["tool_timeouts"]
            counted["environment/tool_failure_share"] = failed / counts["tool_calls"]
        return counted

    def close(self) -> None:
        """Close the environment, if it has ``close`` (on the loop, if asynchronous), and stop the loop."""
        close = getattr(self.play, "close", None)
        self.play = None  # type: ignore[assignment]
        try:
            made = close() if close is not None else None
            if inspect.isawaitable(made):
                self._finish(made)
        except Exception as error:  # the run has ended; its results are kept
            log.warning("%s failed to close: %s: %s", self.label, type(error).__name__, error)
        finally:
            if self.loop is not None:
                self.loop.close()
                self.loop = None

    def _finish(self, awaitable: Any) -> None:
        async def wait() -> None:
            """Await any awaitable as a coroutine."""
            await awaitable

        self.loop = self.loop or LoopThread()
        asyncio.run_coroutine_threadsafe(wait(), self.loop.loop).result(self.config.tool_timeout_seconds)

    def _episode(self, request: Request, ask: Ask) -> Episode:
        policy = Policy(request, self.limits, ask, self.tokenizer)
        return Episode(policy, self.chat, self.reader, self.spec.rewards)

    def _ended(self, end: Finished) -> Rollout:
        """Count an ended episode and apply its failure policy; return its rollout.

        Raises:
            TrainingFailed: the policy is ``fail``.
        """
        request, rollout = end.request, end.rollout
        counts = self._counts[request.id.startswith(HELD_OUT)]
        counts.update(end.counts)
        self._seconds[request.id.startswith(HELD_OUT)].append(end.seconds)
        counts["truncated"] += end.limited
        rollout.request_id, rollout.group_id, rollout.index = request.id, request.group_id, request.index
        if end.failure:
            counts[f"{end.failure}s"] += 1
            self._failed(end)
        return rollout

    def _failed(self, end: Finished) -> None:
        policy = self.config.on_timeout if end.failure == "timeout" else self.config.on_error
        end.rollout.failure, end.rollout.valid = end.failure, policy != "drop"
        where = f"episode {end.request.id} (prompt {end.request.prompt.id})"
        self._last_failure = f"{where}: {end.message}"
        if end.message not in self._logged and len(self._logged) < TRACES_LOGGED:
            self._logged.add(end.message)
            log.warning("%s failed in %s: %s", self.label, where, f"{end.message}\n{end.trace}".strip())
        if policy == "fail":
            raise TrainingFailed(
                f"{self.label} failed in {where}: {end.message}. The run ends because "
                f'environment.on_{end.failure} = "fail". The weights were left alone.'
            )
