"""Early stopping: a step requests more groups than it needs and stops the stragglers.

A stopped response resumes in the next step at the token where it stopped (`rollout.partial_rollouts`), or is dropped.
Dropping biases the data towards short responses. Carrying over learns from tokens of older policies; each token keeps
the log-prob and the version that it was sampled with.

A stopped episode of an environment has state outside the sampler, so it starts again from its prompt.

Left out: rewards while others are sampled.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engine_core.contracts.parts import CARRIED
from engine_core.runs.rollout_files import read_rollouts, write_rollouts
from engine_core.sampler_session import SamplerSession
from engine_core.train.rollouts import groups_of
from engine_core.types import Prompt, Request, Rollout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from engine_core.contracts.parts import Episodes
    from engine_core.contracts.runtime import WorkerGroup
    from engine_core.timeline import Clock
    from engine_core.train.settings import Settings

COUNTS = (
    *("sampling/stopped", "sampling/stopped_tokens", "sampling/dropped_groups", "sampling/stale_groups"),
    *("sampling/carried_groups", "sampling/resumed_groups", "sampling/resumed_tokens"),
)
"""Metrics of a step."""

ROUNDS_FOR_MORE = 8  # after so many rounds a call asks for one round more
MOST_AT_ONCE = 4  # most rounds of a call

log = logging.getLogger("engine")

RequestOf = Callable[[Prompt, str], Request]


@dataclass
class Group:
    """The responses to a prompt, finished and in flight."""

    prompt: Prompt
    requests: dict[str, Request]  # of all responses, by id, in order
    done: dict[str, Rollout] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all responses have finished."""
        return len(self.done) == len(self.requests)

    @property
    def left(self) -> list[Request]:
        """Requests of the unfinished responses."""
        return [request for id, request in self.requests.items() if id not in self.done]

    def rollouts(self, number: int, stopped: dict[str, Rollout]) -> list[Rollout]:
        """Return copies of the responses in order, as group ``number``; unfinished ones as far as they were sampled.

        Args:
            number: group id of the copies.
            stopped: partial rollouts that the sampler returned, by request id.
        """
        held = self.done | {r.id: stopped.get(r.id) or r.unsampled() for r in self.left}
        return [
            dataclasses.replace(
                held[id], group_id=number, rewards=dict(held[id].rewards), extras=dict(held[id].extras)
            )
            for id in self.requests
        ]


class Stragglers:
    """An ``EarlyStop`` that over-samples, stops stragglers, and carries them over or drops them.

    Args:
        settings: of the run.
        groups: worker groups by role; ``rollout`` is in it when a step samples.
        clock: time and threads.
        environment: plays an episode for each request; None: a request gives one response.
    """

    def __init__(
        self,
        settings: Settings,
        groups: Mapping[str, WorkerGroup],
        clock: Clock,
        environment: Episodes | None = None,
    ) -> None:
        self.settings, self.config = settings, settings.config.rollout
        self.groups, self.clock, self.environment = groups, clock, environment
        self.carried: list[Rollout] = []  # sorted by group, the oldest first; never changed in place
        self._counts: Counter[str] = Counter()
        self._wanted = 0  # groups that this round needs
        self._step = self._drawn = 0  # the step, and the prompts that it has taken so far

    @property
    def off_policy(self) -> bool:
        """Whether the update may see tokens of older policies."""
        return self.config.partial_rollouts

    def to_take(self, wanted: int, version: int) -> int:
        """Return how many prompts to take from the data for a round of ``wanted`` groups.

        Args:
            wanted: groups that the round needs.
            version: policy version of the sampler.
        """
        self._wanted = wanted
        self._forget_old(version)
        under_way = math.ceil(wanted * self.config.over_sampling)
        return max(under_way - len(groups_of(self.carried)), 0)

    def sample(
        self, prompts: Sequence[Prompt], step: int, first_group: int, request_of: RequestOf
    ) -> list[Rollout]:
        """Resume carried groups and start new ones, and sample until enough groups are complete.

        Args:
            prompts: the prompts of the new groups.
            step: first part of request ids ``STEP:PROMPT:RESPONSE``.
            first_group: group id of the first returned group.
            request_of: builds the request of a prompt with a given id.

        Returns:
            The rollouts of the wanted groups, carried groups first. Complete groups beyond these are put away.
        """
        groups = [*self._resumed(request_of), *self._new(prompts, step, request_of)]
        stopped = self._run(groups)
        complete = [group for group in groups if group.complete][: self._wanted]
        chosen = {id(group) for group in complete}
        self._put_away([group for group in groups if id(group) not in chosen], stopped)
        return [
            rollout
            for number, group in enumerate(complete, first_group)
            for rollout in group.rollouts(number, {})
        ]

    def metrics(self) -> dict[str, float]:
        """Return ``sampling/...`` counts since the last call."""
        counts, self._counts = self._counts, Counter()
        return {name: float(counts[name]) for name in COUNTS}

    def files(self) -> dict[str, Callable[[Path], object]]:
        """Return the writer of the groups that are carried now, by file name."""
        if not self.carried:
            return {}
        return {CARRIED: partial(write_rollouts, step=0, rollouts=tuple(self.carried))}

    def load(self, folder: Path) -> None:
        """Restore the carried groups of a checkpoint.

        Args:
            folder: the checkpoint. Without the file nothing was carried.
        """
        self.carried = read_rollouts(folder / CARRIED) if (folder / CARRIED).is_file() else []
        if self.carried and not self.off_policy:
            groups = len(groups_of(self.carried))
            log.warning(
                "%d groups that an earlier attempt had carried over are dropped: rollout.partial_rollouts is off now.",
                groups,
            )
            unfinished = [rollout for rollout in self.carried if rollout.finish_reason == "abort"]
            self._counts["sampling/dropped_groups"] += groups
            self._counts["sampling/stopped_tokens"] += sum(r.response_length for r in unfinished)
            self.carried = []

    def _new(self, prompts: Sequence[Prompt], step: int, request_of: RequestOf) -> Iterator[Group]:
        """Yield a group for each new prompt."""
        if step != self._step:
            self._step, self._drawn = step, 0
        size = self.settings.now.rollout.group_size
        for number, prompt in enumerate(prompts, self._drawn):
            made = [request_of(prompt, f"{step}:{number}:{index}") for index in range(size)]
            yield Group(prompt, {request.id: request for request in made})
        self._drawn += len(prompts)

    def _resumed(self, request_of: RequestOf) -> Iterator[Group]:
        """Yield the carried groups with requests that continue unfinished responses; request ids stay the same."""
        for members in groups_of(self.carried):
            group = Group(
                members[0].prompt, {r.request_id: request_of(r.prompt, r.request_id) for r in members}
            )
            for rollout in members:
                request = group.requests[rollout.request_id]
                if rollout.finish_reason != "abort" or rollout.failure:
                    group.done[request.id] = rollout
                elif rollout.response_length >= request.sampling.max_response_tokens:  # a [schedule]
                    group.done[request.id] = dataclasses.replace(rollout, finish_reason="length")
                elif rollout.response_length:
                    group.requests[request.id] = dataclasses.replace(request, begun=rollout)
                self._counts["sampling/resumed_tokens"] += rollout.response_length
            self._counts["sampling/resumed_groups"] += 1
            yield group
        self.carried = []

    def _run(self, groups: Sequence[Group]) -> dict[str, Rollout]:
        """Sample until enough groups are complete; return the stopped rollouts by request id."""
        sampler = self.groups["rollout"]
        running = {request.id: group for group in groups for request in group.left}
        complete = sum(group.complete for group in groups)
        if not running or complete >= self._wanted:  # nothing was submitted, so nothing needs to be stopped
            return {}
        # rounds make the run repeatable
        turns = SamplerSession(sampler, self.clock, rounds=sampler.repeatable)
        session = self.environment.session(turns) if self.environment else turns
        session.submit([request for group in groups for request in group.left])
        rounds = 0  # so far
        try:
            while running and complete < self._wanted:
                # after many rounds the responses in flight are long, so a few rounds more per call waste little
                count = min(1 + rounds // ROUNDS_FOR_MORE, MOST_AT_ONCE)
                complete += _settle(session.results(rounds=count), running)
                rounds += count
            found = session.cancel(running)
        except BaseException:  # a signal included: cancel this step's requests
            session.abandon()
            raise
        finally:
            session.close()
        # some had just finished
        _settle([r for r in found if r.finish_reason != "abort" or r.failure], running)
        return {rollout.request_id: rollout for rollout in found}

    def _put_away(self, groups: Sequence[Group], stopped: dict[str, Rollout]) -> None:
        """Carry over the groups that this step does not use, or drop them."""
        unfinished = [request.id for group in groups for request in group.left]
        self._counts["sampling/stopped"] += len(unfinished)
        if self.config.partial_rollouts:
            self.carried = [r for i, group in enumerate(groups) for r in group.rollouts(i, stopped)]
            self._counts["sampling/carried_groups"] = len(groups)
            return
        self._counts["sampling/dropped_groups"] += len(groups)
        self._counts["sampling/stopped_tokens"] += sum(
            stopped[id].response_length for id in unfinished if id in stopped
        )

    def _forget_old(self, version: int) -> None:
        """Drop the carried groups whose oldest token exceeds `rollout.partial_max_staleness`."""
        oldest = version - self.config.partial_max_staleness
        old = {
            rollout.group_id
            for rollout in self.carried
            if bool((rollout.policy_versions[rollout.loss_mask] < oldest).any())
        }
        self._counts["sampling/stale_groups"] += len(old)
        self.carried = [
            rollout for group in groups_of(self.carried) for rollout in group if rollout.group_id not in old
        ]


def _settle(finished: Sequence[Rollout], running: dict[str, Group]) -> int:
    """Move finished rollouts out of ``running``; return how many groups they complete.

    If a request was sampled twice because a sampler was lost, its first rollout counts.
    """
    completed = 0
    for rollout in finished:
        if (group := running.pop(rollout.request_id, None)) is not None:
            group.done[rollout.request_id] = rollout
            completed += group.complete
    return completed
