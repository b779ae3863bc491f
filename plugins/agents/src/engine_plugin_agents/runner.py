"""The runner of a step's episodes: it samples their turns with the rollout engine and applies failure policies."""

from __future__ import annotations

import asyncio
import copy
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from engine_core.config.models import DataConfig
from engine_core.data.chat import ChatFormat
from engine_core.errors import TrainingFailed
from engine_core.sampler_session import SamplerSession
from engine_plugin_agents.checks import check_columns, check_reward_names, load_environment
from engine_plugin_agents.episode import Episode
from engine_plugin_agents.event_loop import Finished, LoopThread, News, Session
from engine_plugin_agents.policy import Limits, Policy

if TYPE_CHECKING:
    from engine_core.config.models import EnvironmentConfig
    from engine_core.contracts.runtime import WorkerGroup
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.specs import Environment
    from engine_core.types import Request, Rollout

LINGER_SECONDS = 0.005
"""With an idle sampler: requests of fast tools that come so soon after others are sampled with them."""
ALIVE_SECONDS = 1.0  # between checks of a silent loop
TRACES_LOGGED = 20
COUNTS = (
    "environment/errors",
    "environment/timeouts",
    "environment/truncated",
    "environment/tool_calls",
    "environment/tool_errors",
    "environment/tool_timeouts",
)

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
        self.limits = Limits(
            config.max_turns,
            min(config.max_tokens or max_tokens, max_tokens),
            config.timeout_seconds,
            config.tool_timeout_seconds,
        )
        self._loop: LoopThread | None = None
        self._counts: Counter[str] = Counter()
        self._logged: set[str] = set()

    @property
    def reward_weights(self) -> dict[str, float]:
        """The weights of the rewards that episodes set, by name."""
        return {name: self.config.reward_weights.get(name, 1.0) for name in sorted(self.spec.rewards)}

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse data that lacks a column which the environment needs, with ``DataError``."""
        check_columns(self.config, self.spec, columns)

    def run(
        self,
        group: WorkerGroup,
        requests: Sequence[Request],
        seen: Callable[[Sequence[Rollout]], None] = lambda rollouts: None,
    ) -> list[Rollout]:
        """Play one episode for each request.

        Args:
            group: the rollout engine.
            requests: one per episode, with the seed and sampling parameters of its first turn.
            seen: called with the rollouts of episodes as they end.

        Returns:
            One rollout per request, in order. A failed episode gives its partial rollout with ``failure`` set; it is
            not ``valid`` if its failure policy is ``drop``.

        Raises:
            TrainingFailed: a failure policy requires it, or the environment blocks the loop.
            PluginError: the environment's return value is no rollout of its episode.
        """
        self._loop = self._loop or LoopThread()
        session = Session(self.play, self.label, self.spec.rewards, self.config.max_concurrent)
        episodes = [
            Episode(Policy(request, self.limits, session.ask, self.tokenizer), self.chat, self.spec.rewards)
            for request in requests
        ]
        self._loop.post(session.begin, episodes)
        # sample in rounds: otherwise a finished turn would wait for the other turns of its group
        sampler = SamplerSession(group, rounds=True)
        try:
            finished = self._serve(sampler, session, requests, seen)
            sampler.abandon()  # drop turns of episodes that ended meanwhile
        except BaseException:  # a stop included: leave no request of this step in the sampler
            self._loop.post(session.cancel)
            sampler.abandon()
            raise
        finally:
            sampler.close()
        self._counts += session.counts
        return [finished[number].rollout for number in range(len(requests))]

    def metrics(self) -> dict[str, float]:
        """Return and reset the metrics of the episodes since the previous call."""
        counts, self._counts = self._counts, Counter()
        counted = {name: float(counts[name.partition("/")[2]]) for name in COUNTS}
        return {"environment/turns": counts["turns"] / max(counts["episodes"], 1), **counted}

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
            if self._loop is not None:
                self._loop.close()
                self._loop = None

    def _finish(self, awaitable: Any) -> None:
        async def wait() -> None:
            """Await any awaitable as a coroutine."""
            await awaitable

        self._loop = self._loop or LoopThread()
        asyncio.run_coroutine_threadsafe(wait(), self._loop.loop).result(self.config.tool_timeout_seconds)

    def _serve(
        self,
        sampler: SamplerSession,
        session: Session,
        requests: Sequence[Request],
        seen: Callable[[Sequence[Rollout]], None],
    ) -> dict[int, Finished]:
        """Sample the turns that episodes request until all episodes have ended."""
        assert self._loop is not None
        finished: dict[int, Finished] = {}
        while len(finished) < len(requests):
            news = session.news(ALIVE_SECONDS if sampler.idle else 0.0)
            self._settle(news, requests, finished, seen)
            while news.requests and sampler.idle:
                if session.started - len(finished) <= len(news.requests):
                    break  # all running episodes wait for a turn
                more = session.news(LINGER_SECONDS)
                self._settle(more, requests, finished, seen)
                news.requests += more.requests
                news.dropped += more.dropped
                if not more.requests and not more.finished:
                    break
            dropped = set(news.dropped)
            sampler.submit([request for request in news.requests if request.id not in dropped], news.dropped)
            if not sampler.idle:
                self._loop.post(session.answer, sampler.results())
            elif self._loop.silent_seconds() > self.config.timeout_seconds:
                raise TrainingFailed(
                    f"{self.label} has blocked the event loop for {self.config.timeout_seconds:g} s "
                    f"(environment.timeout_seconds): no episode can continue. It is at {self._loop.where()}. Blocking code "
                    "goes into 'await episode.call(function)'. The weights were left alone."
                )
        return finished

    def _settle(
        self,
        news: News,
        requests: Sequence[Request],
        finished: dict[int, Finished],
        seen: Callable[[Sequence[Rollout]], None],
    ) -> None:
        """Record ended episodes and apply failure policies; raise errors that end the run."""
        if news.broken:
            raise news.broken[0]
        for end in news.finished:
            finished[end.number] = end
            self._counts["episodes"] += 1
            self._counts["turns"] += int(end.rollout.extras["turns"].max())
            self._counts["truncated"] += end.limited
            request = requests[end.number]
            end.rollout.request_id, end.rollout.prompt = request.id, request.prompt
            end.rollout.group_id, end.rollout.index = request.group_id, request.index
            if end.failure:
                failures = sum(bool(each.failure) for each in finished.values())
                self._failed(end, request, failures, len(requests))
        if news.finished:
            seen([end.rollout for end in news.finished])

    def _failed(self, end: Finished, request: Request, failures: int, count: int) -> None:
        """Count a failure and apply its policy."""
        policy = self.config.on_timeout if end.failure == "timeout" else self.config.on_error
        end.rollout.failure, end.rollout.valid = end.failure, policy != "drop"
        self._counts[f"{end.failure}s"] += 1
        where = f"episode {request.id} (prompt {request.prompt.id})"
        if end.message not in self._logged and len(self._logged) < TRACES_LOGGED:
            self._logged.add(end.message)
            log.warning("%s failed in %s: %s", self.label, where, f"{end.message}\n{end.trace}".strip())
        if policy == "fail":
            raise TrainingFailed(
                f"{self.label} failed in {where}: {end.message}. The run ends because "
                f'environment.on_{end.failure} = "fail". The weights were left alone.'
            )
        if failures > self.config.max_failure_share * count:
            raise TrainingFailed(
                f"{self.label} failed in at least {failures} of {count} episodes, more than "
                f"environment.max_failure_share = {self.config.max_failure_share:g} allows. Last: {where}: {end.message}. "
                "The weights were left alone."
            )
