"""Groups that are sampled ahead: admitted, sampled, scored, taken by a step, saved in checkpoints.

The main thread takes rows from the data, admits them, and takes groups for its step. The thread of
``sampler_thread`` samples and the thread of ``scoring_thread`` scores. Both report results under one lock.

consumes: rows, finished rollouts, scored groups; waits for: a step's groups to be ready; unblocked by: ``_scored``, the
error of a thread; produces: requests, the groups of a step, the contents of a checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.rewards.models import Known
from engine_core.runs.rollout_files import read_rollouts, write_rollouts
from engine_core.tables import DISTRIBUTION
from engine_core.types import Prompt
from engine_plugin_trainers.ahead import AheadQueue, Group
from engine_plugin_trainers.sampler_thread import POLL_SECONDS, SamplerThread
from engine_plugin_trainers.scoring_thread import ScoringThread

if TYPE_CHECKING:
    from engine_core.contracts.runtime import WorkerGroup
    from engine_core.rewards import RewardRunner
    from engine_core.timeline import Clock
    from engine_core.train.rollouts import Sampler
    from engine_core.train.settings import Settings
    from engine_core.types import Request, Rollout
    from engine_plugin_trainers.options import AsyncOptions
    from engine_plugin_trainers.sampler_thread import Taker

log = logging.getLogger("engine")

FILE = "ahead/rollouts.parquet"


class AheadGroups:
    """The groups of a run that are sampled ahead, once ``begin`` was called.

    Args:
        settings: of the run.
        sampler: builds the requests.
        options: ``[async]``.
        clock: source of time and threads.
    """

    def __init__(self, settings: Settings, sampler: Sampler, options: AsyncOptions, clock: Clock) -> None:
        self.settings, self.sampler, self.clock = settings, sampler, clock
        self.per_step = settings.config.data.prompts_per_step
        self.queue = AheadQueue(self.per_step, options.max_staleness, options.order == "admitted")
        self.returned: deque[Group] = deque()  # groups of a checkpoint that are to be admitted again
        self.admitted = 0  # prompts taken from the data, since the start
        self.tokens = 0  # sampled tokens of all responses that have arrived
        self.resampled = 0  # responses that were unfinished in the checkpoint
        self.thread: SamplerThread | None = None
        self.scoring: ScoringThread | None = None
        self._changed = clock.condition()
        self._ready = 0  # groups in the queue that are ready
        self._wanted = 0  # groups that the main thread waits for
        self._before: dict[str, float] = {}  # counters at the end of the last step

    def begin(self, group: WorkerGroup, rewards: RewardRunner | None) -> None:
        """Start to sample ahead.

        Args:
            group: the sampler's worker group.
            rewards: score groups as soon as they are complete; None: the step scores them.
        """
        self.thread = SamplerThread(group, self.clock, self.sampler.environment)
        if rewards is not None:
            self.scoring = ScoringThread(rewards, self._scored, self.clock)

    def end(self) -> None:
        """Stop the threads and abandon the responses in flight."""
        for thread in (self.thread, self.scoring):
            if thread is not None:
                thread.close()
        self.thread = self.scoring = None

    def turn(self) -> AbstractContextManager[Any]:
        """Return a context in which the scoring thread does not use the reward workers."""
        return self.scoring.turn if self.scoring else nullcontext()

    def take(self, step: int, count: int, left: int, take: Callable[[int], list[Prompt]]) -> list[Group]:
        """Admit as many groups as the rule of ``ahead`` allows, then wait for the groups of a step and take them.

        Args:
            step: step number.
            count: groups that the step needs.
            left: groups that later steps will take.
            take: takes prompts from the data.

        Raises:
            Exception: the error that ended the sampling or the scoring thread.
        """
        assert self.thread is not None
        with self._changed:
            room = self.queue.room(count, left)
        again = self.again(room)
        fresh = take(room - len(again))
        groups = [*again, *(Group(self.admitted + i, prompt) for i, prompt in enumerate(fresh))]
        self.admitted += len(fresh)
        with self._changed:
            for group in groups:
                self.queue.admit(group, step)
            unasked = [group for group in self.queue.groups if not group.requests]
        self.thread.ask(*(missing for group in unasked if (missing := self._missing(group))))
        with self._changed:
            self._wanted = count
            while self._ready < count or (taken := self.queue.take(step, count)) is None:
                self.thread.check()
                if self.scoring is not None:
                    self.scoring.check()
                self._changed.wait(POLL_SECONDS)
            self._ready -= len(taken)
        return taken

    def again(self, most: int) -> list[Group]:
        """Return at most ``most`` groups of a checkpoint; they come before new ones."""
        return [self.returned.popleft() for _ in range(min(most, len(self.returned)))]

    def known(self, groups: Sequence[Group]) -> Known | None:
        """Return the rewards of taken groups; None if the step has to compute them."""
        if self.scoring is None:
            return None
        outcomes: dict[str, list[Any]] = {}
        for group in groups:
            for name, of_group in (group.outcomes or {}).items():
                outcomes.setdefault(name, []).extend(of_group)
        return Known(outcomes, sum(group.scoring_seconds for group in groups))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a step and of the queue after it."""
        assert self.thread is not None
        with self._changed:
            ready = sum(group.ready for group in self.queue.groups)
            waiting = len(self.queue.groups) - ready
        counters = {
            "async/out_of_order_groups": float(self.queue.overtaken),
            "async/aborted": float(self.thread.cut),
            "async/kept_tokens": float(self.thread.kept_tokens),
            "async/resampled": float(self.resampled),
            "time/sampling": self.thread.busy_seconds,
            "tokens": float(self.tokens),
        }
        since = {name: value - self._before.get(name, 0.0) for name, value in counters.items()}
        self._before, sampled = counters, since.pop("tokens")
        speed = sampled / since["time/sampling"] if since["time/sampling"] else 0.0
        return since | {
            "throughput/generated_tokens_per_second": speed,
            "async/ready_groups": float(ready),
            "async/groups_in_flight": float(waiting),
        }

    def _missing(self, group: Group) -> tuple[Sequence[Request], Taker] | None:
        """Return the missing requests of a group and their taker; None if the group is complete."""
        before, place = divmod(group.number, self.per_step)
        requests = self.sampler.requests([group.prompt], before + 1, place)
        with self._changed:
            group.requests = requests
            asked = {request.id for request in requests}  # after a resume the group size may differ
            group.rollouts = {id: rollout for id, rollout in group.rollouts.items() if id in asked}
            missing = [request for request in requests if request.id not in group.rollouts]
        if missing:
            return missing, partial(self._arrived, group)
        self._completed(group)
        return None

    def _arrived(self, group: Group, rollout: Rollout) -> None:
        """Add a finished response to its group; called in the sampling thread."""
        with self._changed:
            group.rollouts[rollout.request_id] = rollout
            self.tokens += rollout.sampled_length
            complete = group.complete
        if complete:
            self._completed(group)

    def _completed(self, group: Group) -> None:
        """Pass a complete group to scoring, or mark it ready."""
        if self.scoring is not None:
            self.scoring.put(group)
        else:
            self._scored([group])

    def _scored(self, groups: Sequence[Group]) -> None:
        """Mark groups ready, and wake the main thread if it has enough of them."""
        with self._changed:
            for group in groups:
                group.ready = True
            self._ready += len(groups)
            if self._ready >= self._wanted:  # fewer cannot be enough
                self._changed.notify_all()

    # -- checkpoints --------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the queue as JSON; prompts in flight are sampled again after a resume."""
        with self._changed:
            queued = [{"due": group.due, **_as_json(group)} for group in self.queue.groups]
        return {
            **self._unchanged(),
            "admitted": self.admitted,
            "queue": queued,
            "returned": [_as_json(group) for group in self.returned],
        }

    def files(self, about: Mapping[str, Any]) -> dict[str, Callable[[Path], object]]:
        """Return the writer of the responses that no step has taken yet, by file name.

        Args:
            about: metadata of the file.
        """
        with self._changed:
            held = [rollout for group in self.queue.groups for rollout in group.rollouts.values()]
        return {FILE: partial(write_rollouts, step=0, rollouts=held, about=about)}

    def load(self, state: Mapping[str, Any] | None, folder: Path, steps: int) -> None:
        """Restore the queue.

        Args:
            state: result of ``state``; None if the checkpoint's run sampled nothing ahead.
            folder: the checkpoint.
            steps: steps that are done.
        """
        if state is None:
            self.admitted = steps * self.per_step
            return
        self.admitted = state["admitted"]
        groups = [_of_json(entry) for entry in state["queue"]]
        if any(state.get(name) != value for name, value in self._unchanged().items()):
            self.returned.extend(groups)  # in the order of the data; they are sampled again
        elif groups:
            self._restore(groups, folder)
        self.returned.extend(_of_json(entry) for entry in state["returned"])
        size, restored = self.settings.config.rollout.group_size, sum(len(group.rollouts) for group in groups)
        self.resampled = len(groups) * size - restored
        log.info(
            "Of %d queued prompts %d responses are restored, %d are sampled again.",
            len(groups), restored, self.resampled,
        )  # fmt: skip

    def _unchanged(self) -> dict[str, Any]:
        """Return the settings that must be unchanged for queued responses to be used."""
        rollout = self.settings.now.rollout
        sampled = {name: getattr(rollout, name) for name in DISTRIBUTION}
        return {"max_staleness": self.queue.max_staleness, "prompts_per_step": self.per_step, **sampled}

    def _restore(self, groups: Sequence[Group], folder: Path) -> None:
        """Queue the groups with the responses of the checkpoint."""
        held: dict[int, dict[str, Rollout]] = {}
        for rollout in read_rollouts(folder / FILE):
            of_step, place, _ = map(int, rollout.request_id.split(":"))
            held.setdefault((of_step - 1) * self.per_step + place, {})[rollout.request_id] = rollout
        for group in groups:
            group.rollouts = held.get(group.number, {})
            for rollout in group.rollouts.values():
                if rollout.prompt.token_ids == group.prompt.token_ids:  # else an environment has changed them
                    rollout.prompt = group.prompt
        self.queue.groups = list(groups)


def _as_json(group: Group) -> dict[str, Any]:
    if group.as_json is None:
        plain = {field.name: getattr(group.prompt, field.name) for field in dataclasses.fields(Prompt)}
        # the other fields are JSON as they are
        columns = json.loads(json.dumps(group.prompt.columns, default=str))
        plain |= {"token_ids": list(group.prompt.token_ids), "columns": columns}
        group.as_json = {"number": group.number, "prompt": plain}
    return group.as_json


def _of_json(entry: Mapping[str, Any]) -> Group:
    return Group(entry["number"], Prompt(**entry["prompt"]), entry.get("due", 0))
