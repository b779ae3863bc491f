"""Rollouts that are sampled ahead: admitted, sampled, scored, taken by a step, saved in checkpoints.

The main thread takes rows from the data, admits them, and takes groups for its step. The thread of
``sampler_thread`` samples and the thread of ``scoring_thread`` scores. Both report results under one lock.

consumes: rows, finished rollouts, scored groups; waits for: a step's groups to be ready, and for the sampler before new
weights are sent; unblocked by: ``_scored``, the error of a thread; produces: requests, the groups of a step, the
contents of a checkpoint.
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
"""A rollout, its ``loss_mask`` and ``policy_versions``, each followed by its count of in-place changes."""

POLL_SECONDS = 0.1  # interval at which a caller that waits for groups checks that the threads are alive
FILE = "ahead/rollouts.parquet"


class AheadSource(RolloutSource):
    """A source of groups that were sampled ahead; before ``begin`` it is a plain ``RolloutSource``.

    Args:
        run: the trainer that uses the source.
    """

    run: AsyncTrainer

    def __init__(self, run: AsyncTrainer) -> None:
        super().__init__(run)
        options, self.per_step = run.options, run.config.data.prompts_per_step
        self.queue = AheadQueue(self.per_step, options.max_staleness, options.order == "admitted")
        self.returned: deque[Group] = deque()  # groups of a checkpoint that are to be admitted again
        self.admitted = 0  # prompts taken from the data, since the start
        self.tokens = 0  # sampled tokens of all responses that had arrived by the end of the last step
        self.resampled = 0  # responses that were unfinished in the checkpoint
        self.thread: SamplerThread | None = None
        self.scoring: ScoringThread | None = None
        self._changed = run.clock.condition()
        self._taken: list[Group] = []  # groups of this round
        self._ages: VersionRuns | None = None  # of the round's rollouts, as they arrived
        # these rollouts and their columns, for `batch`
        self._came: tuple[list[Came], dict[str, torch.Tensor]] = [], {}
        # of the batch's rollouts, if these are unchanged since they arrived
        self._batched: VersionRuns | None = None
        self._uncounted: list[Rollout] = []  # rollouts that are not in `tokens` yet
        self._ready = 0  # groups in the queue that are ready
        self._wanted = 0  # groups that the main thread waits for
        self._before: dict[str, float] = {}  # counters at the end of the last step

    def begin(self) -> None:
        """Start to sample ahead; the workers must be running."""
        self.thread = SamplerThread(self.run.groups["rollout"], self.run.clock)
        self.run.groups["rollout"] = ThreadedSampler(self.thread)
        config = self.run.config.rollout
        if config.overlap_rewards and config.group_size > 1 and self.rewards.in_parts():
            self.scoring = ScoringThread(self.rewards, self._scored, self.run.clock)

    def end(self) -> None:
        """Stop the threads and abandon the responses in flight."""
        if self.thread is not None:
            self.thread.close()
            self.thread = None
        if self.scoring is not None:
            self.scoring.close()
            self.scoring = None

    def sync(self, updated: bool = True) -> dict[str, float]:
        """Send the actor's weights to the sampler; responses in flight are treated as `async.weight_updates` says."""
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
        """Pause the sampler for the block and keep its requests; call it within ``held``."""
        assert self.thread is not None
        self.thread.group.call("pause", mode="keep").result()
        yield
        self.thread.group.call("resume").result()

    def rollouts(self, step: int) -> tuple[list[Rollout], dict[str, float]]:
        """Admit groups, and take and score those of the step."""
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
        return rollouts, metrics | self._step_metrics(rollouts)

    def sample_and_score(
        self, prompts: Sequence[Prompt], step: int, first_group: int = 0
    ) -> tuple[list[Rollout], EarlyScores | Known | None]:
        """Return the rollouts of the groups that this round took, and their rewards if these are known.

        The groups are numbered from ``first_group`` on.
        """
        if self.thread is None:
            return super().sample_and_score(prompts, step, first_group)
        found: list[Rollout] = []
        for number, group in enumerate(self._taken, first_group):
            for rollout in group.in_order():
                found.append(taken := rollout.copy())  # the group may still be written to a checkpoint
                taken.group_id, taken.rewards, taken.answers = number, {}, {}
        self._check_staleness(found)
        self._settle_late(found)
        if self.scoring is None:
            return found, None  # `score` computes them
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
        """Fill in the rewards while the scoring thread is not using the reward workers."""
        with self.scoring.turn() if self.scoring else contextlib.nullcontext():
            return super().score(rollouts, step, training, early)

    def fresh(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return ``fresh`` [T] bool, True on tokens of the policy that is trained now; {} if all tokens are."""
        if self.thread is None:
            return super().fresh(batch)
        came = self._batched
        if came is not None and bool((came.versions == self.version).all()):
            return {}
        fresh = batch["policy_versions"] == self.version
        if came is not None and bool(batch["valid"].all()):
            return {"fresh": fresh}  # every token is learned from, and one of them is older
        return {} if bool((fresh | ~batch["loss_mask"]).all()) else {"fresh": fresh}

    def known_columns(self, rollouts: Sequence[Rollout]) -> Mapping[str, torch.Tensor] | None:
        """Return the [T] columns of the rollouts that were just taken, if no stage has changed a rollout since."""
        (came, columns), self._came = self._came, ([], {})  # not needed after this
        same = len(came) == len(rollouts) and all(map(_as_it_came, came, rollouts))
        self._batched = self._unchanged() if same else None
        return columns if self._batched is not None else None

    # -- groups -------------------------------------------------------------

    def _admit(self, step: int, needed: int) -> None:
        """Request as many groups as the rule of ``ahead`` allows."""
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
        """Return at most ``most`` groups of a checkpoint; they come before new ones."""
        return [self.returned.popleft() for _ in range(min(most, len(self.returned)))]

    def _take(self, count: int) -> list[Prompt]:
        """Take prompts; those that an earlier attempt had already taken from the data come first."""
        again = [group.prompt for group in self._again(count)]
        return [*again, *super()._take(count - len(again))]

    def _missing(self, group: Group) -> tuple[Sequence[Request], Taker] | None:
        """Return the missing requests of a group and their taker; None if the group is complete."""
        size, label = self.run.config.rollout.group_size, divmod(group.number, self.per_step)
        requests = self._requests([group.prompt], label[0] + 1, size, self._as_told(label[0] + 1), label[1])
        with self._changed:
            group.requests = requests
            asked = {request.id for request in requests}  # after a resume the group size may differ
            group.rollouts = {id: rollout for id, rollout in group.rollouts.items() if id in asked}
            missing = [request for request in requests if request.id not in group.rollouts]
        if missing:
            return missing, partial(self._arrived, group)
        self._completed(group)
        return None

    def _arrived(self, group: Group, rollouts: Sequence[Rollout]) -> None:
        """Add finished responses to a group; called in the sampling thread."""
        with self._changed:
            for rollout in rollouts:
                group.rollouts[rollout.request_id] = rollout
            self._uncounted += rollouts
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

    def _await(self, step: int, count: int) -> list[Group]:
        """Wait until the groups of a step are ready, and take them.

        Raises:
            Exception: the error that ended the sampling or the scoring thread.
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
        """Check that no token is older than the rule of ``ahead`` allows.

        Raises:
            TrainingFailed: a token is too old.
        """
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
        """Return metrics of the age in versions of a step's tokens."""
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
        """Return the version runs of the step's rollouts as they arrived; None if stages may change them."""
        return None if self.run.config_now.stage else self._ages

    def sampled_tokens(self, rollouts: Sequence[Rollout]) -> int:
        """Return the number of sampled tokens; known without another pass if no stage runs."""
        came = self._unchanged()
        return super().sampled_tokens(rollouts) if came is None else int(came.counts.sum())

    def _count(self) -> None:
        """Add the tokens of the rollouts that have arrived."""
        with self._changed:
            came, self._uncounted = self._uncounted, []
        self.tokens += sampled_tokens(came)

    def _step_metrics(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the metrics of a step and of the queue after it."""
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
        """Return the queue as JSON; prompts in flight are sampled again after a resume."""
        with self._changed:
            queued = [{"due": group.due, **_as_json(group)} for group in self.queue.groups]
        return {
            **self._settings(),
            "admitted": self.admitted,
            "queue": queued,
            "returned": [_as_json(group) for group in self.returned],
        }

    def ahead_files(self) -> dict[str, Callable[[Path], object]]:
        """Return the writer of the responses that no step has taken yet, by file name."""
        with self._changed:
            held = [rollout for group in self.queue.groups for rollout in group.rollouts.values()]
        return {FILE: partial(write_rollouts, step=0, rollouts=held, about=self.about())}

    def load_ahead(self, state: Mapping[str, Any] | None, folder: Path) -> None:
        """Restore the queue; ``state`` is None if the checkpoint's run sampled nothing ahead."""
        if state is None:
            self.admitted = self.run.step_done * self.per_step
            return
        self.admitted = state["admitted"]
        groups = [_of_json(entry) for entry in state["queue"]]
        if any(state.get(name) != value for name, value in self._settings().items()):
            self.returned.extend(groups)  # in the order of the data; they are sampled again
        elif groups:
            self._restore(groups, folder)
        self.returned.extend(_of_json(entry) for entry in state["returned"])
        size, size_of = self.run.config.rollout.group_size, [len(group.rollouts) for group in groups]
        self.resampled = len(groups) * size - sum(size_of)
        log.info(
            "Of %d queued prompts %d responses are restored, %d are sampled again.",
            len(groups), sum(size_of), self.resampled,
        )  # fmt: skip

    def _settings(self) -> dict[str, Any]:
        """Return the settings that must be unchanged for queued responses to be used."""
        about = {name: value for name, value in self.about().items() if name != "tokenizer"}
        return {"max_staleness": self.queue.max_staleness, "prompts_per_step": self.per_step, **about}

    def _restore(self, groups: Sequence[Group], folder: Path) -> None:
        """Queue the groups with the responses of the checkpoint."""
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
    """Return the rollout with its tensors and their in-place change counts."""
    mask, versions = rollout.loss_mask, rollout.policy_versions
    return rollout, mask, mask._version, versions, versions._version


def _as_it_came(came: Came, rollout: Rollout) -> bool:
    """Return whether this is the same rollout with no token masked; the trainer of a plugin may mask tokens."""
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
