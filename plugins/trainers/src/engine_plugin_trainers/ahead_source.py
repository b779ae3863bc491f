"""Rollouts that are sampled ahead: admitted, awaited, scored, taken by a step, kept in checkpoints.

The main thread takes rows from the data, admits them, and takes groups for its step. The thread of
``sampler_thread`` samples, the thread of ``scoring_thread`` scores; both say what they have done under one lock.

consumes: rows, finished rollouts, scored groups; waits for: a step's groups to be ready, and before new weights for the
sampler; unblocked by: ``_scored``, the error of a thread; produces: requests, the groups of a step, what a checkpoint holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.errors import TrainingFailed
from engine_core.rewards.models import Known
from engine_core.runs.rollout_files import read_rollouts, write_rollouts
from engine_core.train.rollouts import RolloutSource
from engine_core.train.stages import Rounds
from engine_core.types import Prompt, sampled_tokens
from engine_plugin_trainers.ahead import AheadQueue, Group
from engine_plugin_trainers.policy_versions import VersionRuns, joined, version_runs
from engine_plugin_trainers.sampler_thread import SamplerThread, ThreadedSampler
from engine_plugin_trainers.scoring_thread import ScoringThread

if TYPE_CHECKING:
    import torch

    from engine_core.contracts.parts import EarlyScores
    from engine_core.types import Batch, Request, Rollout
    from engine_plugin_trainers.async_trainer import AsyncTrainer
    from engine_plugin_trainers.sampler_thread import Taker

log = logging.getLogger("engine")

Came = tuple["Rollout", "torch.Tensor", int, "torch.Tensor", int]
"""A rollout, its ``loss_mask`` and its ``policy_versions`` with how often each had been changed in place."""

POLL_SECONDS = 0.1  # until whoever waits for groups looks whether the threads still live
FILE = "ahead/rollouts.parquet"


class AheadSource(RolloutSource):
    """Groups that were sampled ahead, once ``begin`` was called; before, those of ``RolloutSource``.

    Args:
        run: the trainer that it serves.
    """

    run: AsyncTrainer

    def __init__(self, run: AsyncTrainer) -> None:
        super().__init__(run)
        options, self.per_step = run.options, run.config.data.prompts_per_step
        self.queue = AheadQueue(self.per_step, options.max_staleness, options.order == "admitted")
        self.returned: deque[Group] = deque()  # prompts of a checkpoint that wait to be admitted again
        self.admitted = 0  # prompts taken from the data, since the beginning
        self.tokens = 0  # sampled, of all responses that had come by the end of the last step
        self.resampled = 0  # responses that a checkpoint knew only as asked for
        self.thread: SamplerThread | None = None
        self.scoring: ScoringThread | None = None
        self._changed = run.clock.condition()
        self._taken: list[Group] = []  # of this round
        self._ages: VersionRuns | None = None  # of its rollouts, as they came
        # these with their columns, for `batch`
        self._came: tuple[list[Came], dict[str, torch.Tensor]] = [], {}
        self._batched: VersionRuns | None = None  # of the rollouts of the batch, where they are these
        self._uncounted: list[Rollout] = []  # that have come since then
        self._ready = 0  # groups in the queue that are
        self._wanted = 0  # groups that somebody waits for
        self._before: dict[str, float] = {}  # counters at the end of the last step

    def begin(self) -> None:
        """Start to sample ahead: the workers are there."""
        self.thread = SamplerThread(self.run.groups["rollout"], self.run.clock)
        self.run.groups["rollout"] = ThreadedSampler(self.thread)
        config = self.run.config.rollout
        if config.overlap_rewards and config.group_size > 1 and self.rewards.in_parts():
            self.scoring = ScoringThread(self.rewards, self._scored, self.run.clock)

    def end(self) -> None:
        """Stop the threads; what is being sampled is left."""
        if self.thread is not None:
            self.thread.close()
            self.thread = None
        if self.scoring is not None:
            self.scoring.close()
            self.scoring = None

    def sync(self, updated: bool = True) -> dict[str, float]:
        """As ``RolloutSource.sync``; what is being sampled is dealt with as `async.weight_updates` says."""
        if self.thread is None:
            return super().sync(updated)
        mode, clock = self.run.weight_updates, self.run.clock
        start = clock.now()
        if mode == "drain":
            self.thread.drained()
        with self.thread.held():
            if mode == "abort":
                self.thread.cut_off()
            with self._paused() if mode == "keep" else contextlib.nullcontext():
                waited = clock.now() - start
                return super().sync(updated) | {"time/sync_wait": waited}

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """The sampler stands still with what it has; within ``held``."""
        assert self.thread is not None
        self.thread.group.call("pause", mode="keep").result()
        yield
        self.thread.group.call("resume").result()

    def rollouts(self, step: int) -> tuple[list[Rollout], dict[str, float]]:
        if self.thread is None or self.recorded is not None:
            return super().rollouts(step)
        rounds = Rounds(self, step, greedy=False)
        while missing := rounds.missing:
            with self.run.phase("generate"):
                self._admit(step, missing)
                self._taken = self._await(step, missing)
                rounds.sample([group.prompt for group in self._taken])
            with self.run.phase("reward"):
                rounds.score()
        rollouts, metrics = rounds.finish()
        self.keep(rollouts, step)
        return rollouts, metrics | self._told(rollouts)

    def sample_and_score(
        self, prompts: Sequence[Prompt], step: int, first_group: int = 0
    ) -> tuple[list[Rollout], EarlyScores | Known | None]:
        """The groups that this round has taken, numbered from ``first_group`` on; what is known of their rewards."""
        if self.thread is None:
            return super().sample_and_score(prompts, step, first_group)
        found: list[Rollout] = []
        for number, group in enumerate(self._taken, first_group):
            for rollout in group.in_order():
                found.append(taken := rollout.copy())  # a checkpoint may still be written of the group
                taken.group_id, taken.rewards, taken.answers = number, {}, {}
        self._check_staleness(found)
        self._settle_late(found)
        if self.scoring is None:
            return found, None  # `score` works them out
        outcomes: dict[str, list[Any]] = {}
        for group in self._taken:
            for name, of_group in (group.outcomes or {}).items():
                outcomes.setdefault(name, []).extend(of_group)
        seconds = sum(self.scoring.seconds.pop(group.number, 0.0) for group in self._taken)
        return found, Known(outcomes, seconds)

    def score(
        self,
        rollouts: list[Rollout],
        step: int,
        training: bool = True,
        early: EarlyScores | Known | None = None,
    ) -> dict[str, float]:
        with self.scoring.turn() if self.scoring else contextlib.nullcontext():
            return super().score(rollouts, step, training, early)

    def fresh(self, batch: Batch) -> dict[str, torch.Tensor]:
        """``fresh`` [T] bool, True on tokens of the policy that is trained now; nothing where all are."""
        if self.thread is None:
            return super().fresh(batch)
        came = self._batched
        if came is not None and bool((came.versions == self.version).all()):
            return {}
        fresh = batch["policy_versions"] == self.version
        if came is not None and bool(batch["valid"].all()):
            return {"fresh": fresh}  # each of these tokens is learned from, an older one, too
        return {} if bool((fresh | ~batch["loss_mask"]).all()) else {"fresh": fresh}

    def known_columns(self, rollouts: Sequence[Rollout]) -> Mapping[str, torch.Tensor] | None:
        (came, columns), self._came = self._came, ([], {})  # nobody needs them after this
        same = len(came) == len(rollouts) and all(map(_as_it_came, came, rollouts))
        self._batched = self._unchanged() if same else None
        return columns if self._batched is not None else None

    # -- groups -------------------------------------------------------------

    def _admit(self, step: int, needed: int) -> None:
        """Have as many groups sampled as the rule allows (``ahead``)."""
        assert self.thread is not None
        left = (self.run.total_steps - step) * self.per_step
        with self._changed:
            room = self.queue.room(needed, left)
        again = self._again(room)
        fresh = self.run.source.take(room - len(again))
        groups = [*again, *(Group(self.admitted + i, prompt) for i, prompt in enumerate(fresh))]
        self.admitted += len(fresh)
        with self._changed:
            for group in groups:
                self.queue.admit(group, step)
            unasked = [group for group in self.queue.groups if not group.requests]
        self.thread.ask_all([missing for group in unasked if (missing := self._missing(group))])

    def _again(self, most: int) -> list[Group]:
        """Groups that a checkpoint had asked for, before all others."""
        return [self.returned.popleft() for _ in range(min(most, len(self.returned)))]

    def _take(self, count: int) -> list[Prompt]:
        """Where nothing is sampled ahead any more, what an earlier attempt had taken from the data comes first, too."""
        again = [group.prompt for group in self._again(count)]
        return [*again, *super()._take(count - len(again))]

    def _missing(self, group: Group) -> tuple[Sequence[Request], Taker] | None:
        """What is missing of a group, for the sampler; a group that lacks nothing is complete."""
        size, label = self.run.config.rollout.group_size, divmod(group.number, self.per_step)
        requests = self._requests([group.prompt], label[0] + 1, size, self._as_told(label[0] + 1), label[1])
        with self._changed:
            group.requests = requests
            asked = {request.id for request in requests}  # of another group size, perhaps, after a resume
            group.rollouts = {id: rollout for id, rollout in group.rollouts.items() if id in asked}
            missing = [request for request in requests if request.id not in group.rollouts]
        if missing:
            return missing, partial(self._arrived, group)
        self._completed(group)
        return None

    def _arrived(self, group: Group, rollouts: Sequence[Rollout]) -> None:
        """Some responses of a group are there; in the sampler's thread."""
        with self._changed:
            for rollout in rollouts:
                group.rollouts[rollout.request_id] = rollout
            self._uncounted += rollouts
            complete = group.complete
        if complete:
            self._completed(group)

    def _completed(self, group: Group) -> None:
        if self.scoring is not None:
            self.scoring.put(group)
        else:
            self._scored([group])

    def _scored(self, groups: Sequence[Group]) -> None:
        with self._changed:
            for group in groups:
                group.ready = True
            self._ready += len(groups)
            if self._ready >= self._wanted:  # else it is too early to look
                self._changed.notify_all()

    def _await(self, step: int, count: int) -> list[Group]:
        """The groups of a step; waits until they are ready, or the sampler has failed.

        Raises:
            Exception: what has ended a thread.
        """
        assert self.thread is not None
        with self._changed:
            self._wanted = count
            while self._ready < count or (taken := self.queue.take(step, count)) is None:
                self.thread.check()
                if self.scoring is not None:
                    self.scoring.check()
                self._changed.wait(POLL_SECONDS)
            self._ready -= len(taken)
        return taken

    def _check_staleness(self, rollouts: Sequence[Rollout]) -> None:
        """The rule of ``ahead``, held against what came."""
        most = self.run.options.max_staleness
        columns = joined(rollouts)
        found = self._ages = version_runs(rollouts, columns)
        self._came = list(map(_seen, rollouts)), columns
        if not len(found.versions) or self.version - int(found.versions.min()) <= most:
            return
        place, oldest = next((p, v) for p, v in found.oldest().items() if self.version - v > most)
        raise TrainingFailed(
            f"Rollout '{rollouts[place].request_id}' has a token that is {self.version - oldest} policy versions old "
            f"(async.max_staleness = {most}). The weights were left alone. This is a bug of the sampler or of the engine."
        )

    def _staleness(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """How many versions ago the tokens of a step were sampled."""
        found = version_runs(rollouts) if (came := self._unchanged()) is None else came
        if not len(found.versions):
            return {"async/staleness_mean": 0.0, "async/staleness_max": 0.0, "async/mixed_version_share": 0.0}
        ages = self.version - found.versions.astype("int64")
        return {
            "async/staleness_mean": int((ages * found.counts).sum()) / int(found.counts.sum()),
            "async/staleness_max": float(max(int(ages.max()), 0)),
            "async/mixed_version_share": found.mixed() / len(rollouts),
        }

    def _unchanged(self) -> VersionRuns | None:
        """Of the step's rollouts as they came, where nobody has changed any: stages may mask tokens, or drop groups."""
        return None if self.run.config_now.stage else self._ages

    def sampled_tokens(self, rollouts: Sequence[Rollout]) -> int:
        came = self._unchanged()
        return super().sampled_tokens(rollouts) if came is None else int(came.counts.sum())

    def _count(self) -> None:
        """Count the tokens of what has come."""
        with self._changed:
            came, self._uncounted = self._uncounted, []
        self.tokens += sampled_tokens(came)

    def _told(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Metrics of what a step took and what is left."""
        assert self.thread is not None
        self._count()
        with self._changed:
            ready = sum(group.ready for group in self.queue.groups)
            waiting = len(self.queue.groups) - ready
        counters = {
            "async/out_of_order_groups": float(self.queue.overtaken),
            "async/aborted": float(self.thread.cut),
            "async/kept_tokens": float(self.thread.kept_tokens),
            "async/resampled": float(self.resampled),
            "time/sampling": self.thread.busy_seconds,
        }
        tokens = {"tokens": float(self.tokens)}
        since = {n: value - self._before.get(n, 0.0) for n, value in (counters | tokens).items()}
        self._before, sampled = counters | tokens, since.pop("tokens")
        speed = sampled / since["time/sampling"] if since["time/sampling"] else 0.0
        return since | {
            "throughput/generated_tokens_per_second": speed,
            **self._staleness(rollouts),
            "async/ready_groups": float(ready),
            "async/groups_in_flight": float(waiting),
        }

    # -- checkpoints --------------------------------------------------------

    def ahead_state(self) -> dict[str, Any]:
        """JSON of what is queued: prompts in flight are written as to be sampled again."""
        with self._changed:
            queued = [{"due": group.due, **_as_json(group)} for group in self.queue.groups]
        return {
            **self._settings(),
            "admitted": self.admitted,
            "queue": queued,
            "returned": [_as_json(group) for group in self.returned],
        }

    def ahead_files(self) -> dict[str, Callable[[Path], object]]:
        """What writes the responses that no step has taken."""
        with self._changed:
            held = [rollout for group in self.queue.groups for rollout in group.rollouts.values()]
        return {FILE: partial(write_rollouts, step=0, rollouts=held, about=self.about())}

    def load_ahead(self, state: Mapping[str, Any] | None, folder: Path) -> None:
        """Take up what was queued; a checkpoint of a run that sampled nothing ahead has nothing."""
        if state is None:
            self.admitted = self.run.step_done * self.per_step
            return
        self.admitted = state["admitted"]
        groups = [_of_json(entry) for entry in state["queue"]]
        if any(state.get(name) != value for name, value in self._settings().items()):
            self.returned.extend(groups)  # in the order of the data; their responses are other ones now
        elif groups:
            self._restore(groups, folder)
        self.returned.extend(_of_json(entry) for entry in state["returned"])
        size, size_of = self.run.config.rollout.group_size, [len(group.rollouts) for group in groups]
        self.resampled = len(groups) * size - sum(size_of)
        log.info(
            "Of %d queued prompts %d responses are there, %d are sampled again.",
            len(groups), sum(size_of), self.resampled,
        )  # fmt: skip

    def _settings(self) -> dict[str, Any]:
        """Under which queued responses may be learned from."""
        about = {name: value for name, value in self.about().items() if name != "tokenizer"}
        return {"max_staleness": self.queue.max_staleness, "prompts_per_step": self.per_step, **about}

    def _restore(self, groups: Sequence[Group], folder: Path) -> None:
        """Queue them, with the responses that were there."""
        held: dict[int, dict[str, Rollout]] = {}
        for rollout in read_rollouts(folder / FILE):
            of_step, place, _ = map(int, rollout.request_id.split(":"))
            held.setdefault((of_step - 1) * self.per_step + place, {})[rollout.request_id] = rollout
        for group in groups:
            group.rollouts = held.get(group.number, {})
            for rollout in group.rollouts.values():
                rollout.prompt = group.prompt
        self.queue.groups = list(groups)


def _seen(rollout: Rollout) -> Came:
    mask, versions = rollout.loss_mask, rollout.policy_versions
    return rollout, mask, mask._version, versions, versions._version


def _as_it_came(came: Came, rollout: Rollout) -> bool:
    """Whether it is that rollout, and nobody has masked a token: a trainer of somebody else's may."""
    before, mask, masked, versions, changed = came
    return (
        before is rollout
        and rollout.loss_mask is mask
        and mask._version == masked
        and rollout.policy_versions is versions
        and versions._version == changed
    )


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
