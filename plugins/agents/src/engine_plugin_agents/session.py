"""The session of episodes: it has the protocol of ``SamplerSession``, but each request is an episode of several turns.

Whatever drives a sampler drives episodes in the same way: a step of ``rl``, early stopping, and a sampler that runs
ahead. Episodes run on the asyncio loop, in its thread. Their turns are requests of an inner ``SamplerSession``, so new
weights interrupt, pause or wait for turns, never for tools. The thread that calls ``results`` samples.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from engine_core import timeline
from engine_core.errors import EngineError, TrainingFailed
from engine_core.types import TIMEOUT
from engine_plugin_agents import calls
from engine_plugin_agents.checks import Play, check_rollout
from engine_plugin_agents.policy import LimitReached

if TYPE_CHECKING:
    from engine_core.sampler_session import SamplerSession
    from engine_core.types import Request, Rollout
    from engine_plugin_agents.episode import Episode
    from engine_plugin_agents.event_loop import LoopThread

LINGER_SECONDS = 0.005
"""With an idle sampler: turns that fast tools request so soon after others are sampled with them."""
ENDING_SECONDS = 1.0  # of a cancelled episode
ALIVE_SECONDS = 1.0  # between checks of a silent loop
TRACE_CHARACTERS = 3000
NOTHING_SAMPLED = (
    "the episode is over and the policy was never asked, so there is nothing to learn from. Call "
    "'await episode.sample(...)' at least once"
)


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of one episode."""

    request: Request
    rollout: Rollout  # of a failed episode, the part that exists
    counts: Counter[str] = field(default_factory=Counter)  # of tool calls
    failure: str = ""  # "", "error", "timeout"
    message: str = ""
    trace: str = ""
    limited: bool = False  # ended because no turn or token was left
    seconds: Mapping[str, float] = field(default_factory=dict)  # by phase: "sampling", "tool", "waiting"


@dataclass(frozen=True, slots=True)
class Game:
    """An environment, as a session plays it."""

    play: Play
    label: str  # the names of the environment and its plugin, for messages
    rewards: frozenset[str]  # names of the rewards that the environment declares
    slots: asyncio.Semaphore | None  # limits concurrent episodes; None: no limit
    episode_of: Callable[
        [Request, Any], Episode
    ]  # builds the episode of a request, which samples with a function
    ended: Callable[[Finished], Rollout]  # applies failure policies, in the loop's thread
    seconds: float  # time limit of an episode


class EpisodeSession:
    """The in-flight episodes of a sampler's group.

    consumes: requests of episodes; waits for: in ``results`` for a sampled turn or the end of an episode; unblocked by:
    ``turns``, ``submit``, ``close``; produces: the rollout of each episode once.

    Args:
        game: the environment.
        loop: the loop on which episodes run.
        turns: samples the turns of episodes; no other requests are in it.
    """

    def __init__(self, game: Game, loop: LoopThread, turns: SamplerSession) -> None:
        self.game, self.loop, self.turns = game, loop, turns
        self._lock = threading.Lock()
        self._requests: dict[str, Request] = {}  # episodes in flight, by id
        self._ended: list[Rollout] = []  # not yet taken
        self._error: Exception | None = None  # ends the run
        self._closed = False
        # of the loop's thread; others only read
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._cut: dict[str, asyncio.Future[str]] = {}  # by episode: resolved by a turn that timed out
        self._fresh: list[Request] = []  # turns to submit
        self._futures: dict[str, asyncio.Future[Rollout]] = {}  # turns that episodes wait for, by id
        self._playing = 0  # episodes that have started and not ended

    @property
    def in_flight(self) -> list[str]:
        """The ids of the episodes in flight."""
        with self._lock:
            return sorted(self._requests)

    @property
    def idle(self) -> bool:
        """Whether no episode is in flight, all results were taken, and ``results`` has no error to raise."""
        with self._lock:
            return not (self._requests or self._ended or self._error)

    def submit(self, requests: Sequence[Request], dropped: Sequence[str] = ()) -> None:
        """Start episodes and drop others; their rollouts are discarded."""
        self.turns.submit((), self._drop(dropped))
        with self._lock:
            self._requests |= {request.id: request for request in requests}
        self.loop.post(self._begin, [self.game.episode_of(request, self._ask) for request in requests])

    def results(self, rounds: int = 1) -> list[Rollout]:
        """Return the rollouts of episodes that have ended, and sample turns until an episode has.

        Args:
            rounds: as in ``SamplerSession``.

        Raises:
            TrainingFailed: a failure policy requires it, or the environment blocks the loop.
            PluginError: the environment's return value is no rollout of its episode.
            EngineError: an engine has failed, or was lost and is not replaced.
        """
        while not self._closed:
            with self._lock:
                ended, self._ended = self._ended, []
            if self._error is not None:
                raise self._error
            if ended:
                return ended
            sampled = self.turns.results(ALIVE_SECONDS, rounds)
            if sampled:
                self.loop.post(self._answer, sampled)
            elif self.turns.idle and self.loop.silent_seconds() > self.game.seconds:
                raise TrainingFailed(
                    f"{self.game.label} has blocked the event loop for {self.game.seconds:g} s "
                    f"(environment.timeout_seconds): no episode can continue. It is at {self.loop.where()}. Blocking code "
                    "goes into 'await episode.call(function)'. The weights were left alone."
                )
        return []

    def cancel(self, ids: Collection[str]) -> list[Rollout]:
        """Stop episodes; an episode that is stopped cannot be resumed and has no rollout.

        Returns:
            The rollouts of those that had just ended.
        """
        with self._lock:  # an episode that ends later finds its request gone
            early = [rollout for rollout in self._ended if rollout.request_id in ids]
            for id in ids:
                self._requests.pop(id, None)
        self.turns.cancel(self._drop(ids))
        return early

    def abandon(self) -> None:
        """Drop all episodes; return when the engines have dropped their turns."""
        self._drop(self.in_flight)
        self._ended = []
        self.turns.abandon()

    def close(self) -> None:
        """Abandon the episodes in flight; a thread that waits in ``results`` returns."""
        self._closed = True
        self._drop(self.in_flight)
        self.turns.close()

    def _drop(self, ids: Collection[str]) -> list[str]:
        """Cancel episodes; return the ids of their turns that ``turns`` has."""
        if not ids:
            return []
        with self._lock:
            for id in ids:
                self._requests.pop(id, None)
            self._ended = [rollout for rollout in self._ended if rollout.request_id not in ids]
        turns = [turn for turn in [*self._futures] if _episode(turn) in ids]  # before the loop forgets them
        self.loop.post(self._cancel, set(ids))
        return turns

    # in the loop's thread

    def _begin(self, episodes: Sequence[Episode]) -> None:
        for episode in episodes:
            id = episode.policy.request.id
            self._cut[id] = asyncio.get_running_loop().create_future()
            self._tasks[id] = asyncio.ensure_future(self._run(episode, self._cut[id]))
            self._tasks[id].add_done_callback(partial(self._forget, id))

    def _forget(self, id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(id) is task:
            del self._tasks[id], self._cut[id]

    def _cancel(self, ids: Collection[str]) -> None:
        for id in ids & self._tasks.keys():
            self._tasks[id].cancel()

    def _answer(self, rollouts: Sequence[Rollout]) -> None:
        """Deliver sampled turns to the episodes that wait for them; a turn that timed out ends its episode."""
        for rollout in rollouts:
            future, cut = self._futures.get(rollout.request_id), self._cut.get(_episode(rollout.request_id))
            if rollout.failure == TIMEOUT and cut is not None and not cut.done():
                cut.set_result("a turn was not sampled within rollout.request_timeout_seconds")
            elif future is not None and not future.done():
                future.set_result(rollout)

    async def _ask(self, request: Request) -> Rollout:
        """Request a turn and return its rollout; turns of one iteration of the loop are requested together."""
        future = self._futures[request.id] = asyncio.get_running_loop().create_future()
        if not self._fresh:
            asyncio.get_running_loop().call_soon(self._flush)
        self._fresh.append(request)
        try:
            with timeline.span("turn", "episodes", f"#{_episode(request.id)}"):
                return await future
        finally:
            if self._futures.get(request.id) is future:
                del self._futures[request.id]
            if future.cancelled():
                self._fresh = [other for other in self._fresh if other is not request]
                self.turns.submit((), [request.id])

    def _flush(self, known: int = 0) -> None:
        """Submit new turns; with an idle sampler wait for those that other episodes request soon after.

        Args:
            known: turns that the previous call has already waited with.
        """
        fast = len(self._futures) < self._playing  # an episode is between its turns
        if self.turns.idle and fast and len(self._fresh) > known:
            asyncio.get_running_loop().call_later(LINGER_SECONDS, self._flush, len(self._fresh))
            return
        self.turns.submit(self._fresh)
        self._fresh = []

    async def _run(self, episode: Episode, cut: asyncio.Future[str]) -> None:
        asked = time.perf_counter()
        async with self.game.slots or contextlib.nullcontext():
            id = episode.policy.request.id
            with timeline.span(id, "episodes", f"#{id}"):
                await self._play(episode, cut, time.perf_counter() - asked)

    async def _play(self, episode: Episode, cut: asyncio.Future[str], waited: float) -> None:
        """Run an episode within its time limit and report its end.

        Args:
            episode: the episode.
            cut: resolved by a turn that timed out.
            waited: seconds that the episode waited for `environment.max_concurrent`.
        """
        request, begun = episode.policy.request, time.perf_counter()
        self._playing += 1
        task = asyncio.ensure_future(calls.contained(partial(self.game.play, episode)))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # not "never retrieved"
        try:
            await asyncio.wait({task, cut}, timeout=self.game.seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._playing -= 1
            sampling = episode.policy.sampling_seconds
            between = max(time.perf_counter() - begun - sampling, 0.0)
            in_time = task.done()
            task.cancel()
            episode.policy.close()
            episode.counts["turns"] = len(episode.policy.turns)
        if not in_time:
            # what it has sampled is complete when it ends; one that resists cancellation is abandoned
            await asyncio.wait({task}, timeout=ENDING_SECONDS)
        try:
            late = cut.result() if cut.done() else f"not over after {self.game.seconds:g} s"
            finished = self._ending(episode, task) if in_time else _late(episode, late)
            seconds = {"sampling": sampling, "tool": between, "waiting": waited}
            finished = dataclasses.replace(finished, seconds=seconds)
            with self._lock:
                if self._requests.get(request.id) is request:  # else it was dropped
                    self._ended.append(self.game.ended(finished))
                    del self._requests[request.id]
        except Exception as error:  # an engine error; the environment's errors are in its task
            self._error = self._error or error
        self.turns.wake()

    def _ending(self, episode: Episode, task: asyncio.Task[Any]) -> Finished:
        request, counts = episode.policy.request, episode.counts
        if task.cancelled():
            return Finished(request, episode.rollout(), counts, "error", "the episode cancelled itself")
        error = task.exception()
        if error is None:
            made = check_rollout(self.game.label, task.result(), episode)
            if episode.policy.turns:
                return Finished(request, made, counts)
            if len(episode.prompt.token_ids) < episode.policy.limits.tokens:
                return Finished(request, made, counts, "error", NOTHING_SAMPLED)
        if error is None or isinstance(error, LimitReached):
            rewards = error.rewards if error else {}
            made = episode.rollout({**dict.fromkeys(self.game.rewards, 0.0), **rewards})
            made.finish_reason = "length"
            return Finished(request, made, counts, limited=True)
        if isinstance(error, EngineError):
            raise error
        frame = error.__traceback__
        while frame and frame.tb_next and frame.tb_frame.f_code.co_filename == calls.__file__:
            frame = frame.tb_next  # skip to the environment's first frame
        trace = "".join(traceback.format_exception(type(error), error, frame))[-TRACE_CHARACTERS:]
        message = f"{type(error).__name__}: {error}"[:500].rstrip(".")
        return Finished(request, episode.rollout(), counts, "error", message, trace)


def _late(episode: Episode, message: str) -> Finished:
    return Finished(episode.policy.request, episode.rollout(), episode.counts, "timeout", message)


def _episode(turn: str) -> str:
    """Return the id of the episode of a turn."""
    return turn.rpartition(":")[0]
