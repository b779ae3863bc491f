"""The streaming update: learn from complete groups while other groups are sampled, and step once at the end.

The gradient of a policy loss is a sum of weight times token loss. Only the divisor of the weights (T or B of
``algorithms.objectives``) belongs to the whole batch. So complete groups are rewarded, get their advantages, and go
through forward and backward while others are sampled. The divisor is then known, the accumulated gradient is scaled by it
once, and metrics by 1 / T. The weights do not change in between: every token is of the policy that is updated.

consumes: finished rollouts of the sampling thread; waits for: the next rollout, the train workers; unblocked by: the
sampling thread or its error; produces: one optimizer step.

Left out: rewards of a model, episodes, stages, and a batch with several optimizer steps, which are refused.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import queue
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from engine_core.algorithms.objectives import normalizer, with_weights
from engine_core.config.schedule import boundaries, config_at
from engine_core.errors import ConfigError, TrainingFailed
from engine_core.metrics import Sum, is_largest, merge
from engine_core.rewards.models import Known
from engine_core.train.capabilities import has_capability
from engine_core.train.rollouts import groups_of
from engine_core.train.trainer import Trainer
from engine_core.types import TrainOutput
from engine_plugin_trainers.cores import shared_cores
from engine_plugin_trainers.sampler_thread import POLL_SECONDS, SamplerThread

if TYPE_CHECKING:
    from engine_core.rewards.signatures import Outcome
    from engine_core.types import Request, Rollout

PARTS = ("step", "rollouts", "batch", "annotate", "with_advantages", "update", "update_on")
"""Methods of a trainer that an update from parts replaces, or calls with a part of a step."""

log = logging.getLogger("engine")


def stream_update(trainer: Trainer, cleanup: contextlib.ExitStack) -> StreamedUpdate | None:
    """Return the update from parts that `rollout.stream_update` and `rollout.stream_deterministic` ask for.

    Args:
        trainer: of the run, prepared; no model is built yet.
        cleanup: closed at the end of the run.

    Returns:
        The update; None if ``auto`` comes to the ordinary update.

    Raises:
        ConfigError: it is asked for and not possible; the message has every reason.
    """
    wanted, deterministic = trainer.config.rollout.stream_update, trainer.config.rollout.stream_deterministic
    problems = list(_update_problems(trainer))
    placed = list(_placement_problems(trainer)) if wanted else []
    if wanted == "auto" and (problems or placed):
        if trainer.training:
            log.info(
                "The update does not stream (rollout.stream_update): %s.", "; ".join([*problems, *placed])
            )
        if problems or not deterministic:
            return None
    elif problems or placed:
        key = "stream_update" if wanted else "stream_deterministic"
        raise ConfigError([f"rollout.{key}: got true, but {each}." for each in [*problems, *placed]])
    process = trainer.config.rollout.process
    if process and trainer.training and _in_one_process(trainer):
        cleanup.enter_context(shared_cores(1 + process.engines))
    return StreamedUpdate(trainer, streams=bool(wanted) and not placed)


class StreamedUpdate:
    """The ``StreamUpdate`` of a run: one optimizer step from gradients that were added group by group.

    Args:
        trainer: of the run.
        streams: whether groups are learned from while others are sampled.
    """

    def __init__(self, trainer: Trainer, streams: bool) -> None:
        self.trainer, self.streams = trainer, streams
        self.deterministic = trainer.config.rollout.stream_deterministic
        self._begin()

    def _begin(self) -> None:
        """Forget the step before."""
        self.output = TrainOutput(0.0)  # sums over the groups learned from, not divided yet
        self.learned: list[str] = []  # ids of the requests in these groups
        self.outcomes: dict[str, dict[str, Outcome]] = {}  # by request and reward
        self.parts = self.tokens = self.overlapped = 0  # calls, their loss tokens, those during sampling
        self.seconds = self.scoring = 0.0  # of updates and of rewards during sampling
        self.penalty: list[tuple[float, int]] = []  # mean KL in the reward, rollouts

    def draw(self, requests: Sequence[Request], step: int) -> tuple[list[Rollout], Known]:
        """Sample the requests; reward complete groups and add their gradients meanwhile.

        Args:
            requests: of a step, group by group.
            step: step number.

        Returns:
            The rollouts in the order of the requests, and the outcomes of their rewards for ``RewardRunner.score``.

        Raises:
            TrainingFailed: a token is of other weights than those that learn.
            EngineError: sampling or a reward has failed. This step's requests are canceled in any case.
        """
        self._begin()
        arrived: queue.SimpleQueue[Rollout] = queue.SimpleQueue()
        found: dict[str, Rollout] = {}
        left = Counter(
            request.group_id for request in requests
        )  # unfinished responses, in the order of the prompts
        thread = SamplerThread(self.trainer.groups["rollout"], self.trainer.clock)
        try:
            thread.ask((requests, arrived.put))
            while left:
                rollouts = _taken(arrived, thread)
                self.trainer.sampler.settle_timeouts(rollouts)
                found |= {rollout.request_id: rollout for rollout in rollouts}
                left.subtract(rollout.group_id for rollout in rollouts)
                for part in self._ready(left):
                    chosen = [found[request.id] for request in requests if request.group_id in part]
                    self._reward(chosen, sampling=len(found) < len(requests))
                    for group in part:
                        del left[group]
        except BaseException:  # a signal included: cancel this step's requests
            thread.session.abandon()
            raise
        finally:
            thread.close()
        return self._known([found[request.id] for request in requests])

    def finish(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Learn from the groups that are left, scale the gradient, check, and do the optimizer step.

        Args:
            rollouts: of the step, scored.

        Returns:
            The metrics of the update.

        Raises:
            TrainingFailed: the gradient is not that of these rollouts and weights, or the policy's check refuses it.
        """
        try:
            done = set(self.learned)
            rest = [group for group in groups_of(rollouts) if group[0].request_id not in done]
            for part in rest if self.deterministic else [list(itertools.chain(*rest))] if rest else []:
                self._learn(part)
            return self._step(rollouts)
        finally:
            self._begin()

    def _ready(self, left: Counter[int]) -> list[list[int]]:
        """Return the complete groups to learn from now, one list for each call."""
        if self.deterministic:
            return [[group] for group in itertools.takewhile(lambda group: not left[group], left)]
        complete = [group for group, count in left.items() if not count]
        return [complete] if complete else []

    def _reward(self, rollouts: Sequence[Rollout], sampling: bool) -> None:
        """Reward complete groups, then learn from them; ``sampling``: others are still sampled."""
        trainer, start = self.trainer, self.trainer.clock.now()
        versions = torch.cat([rollout.policy_versions[rollout.loss_mask] for rollout in rollouts])
        if bool((versions != trainer.version).any()):
            raise TrainingFailed(
                f"A token was sampled by policy version {int(versions.min())} to {int(versions.max())}, and version "
                f"{trainer.version} learns (rollout.stream_update): the weights changed during the step. They were left alone."
            )
        for name, outcomes in trainer.rewards.score_part(rollouts).items():
            for rollout, outcome in zip(rollouts, outcomes, strict=True):
                self.outcomes.setdefault(rollout.request_id, {})[name] = outcome
        scored, before = trainer.clock.now(), self.tokens
        self._learn(rollouts)
        if sampling:
            self.scoring += scored - start
            self.seconds += trainer.clock.now() - start
            self.overlapped += self.tokens - before

    def _learn(self, rollouts: Sequence[Rollout]) -> None:
        """Add the gradient of complete, rewarded groups, divided by nothing that belongs to the whole batch."""
        policy = self.trainer.policy
        batch, noted = self.trainer.annotate(self.trainer.batch(rollouts))
        batch = with_weights(self.trainer.with_advantages(batch), *policy.aggregation, self._unit)
        self.penalty += [(value, len(rollouts)) for value in noted.values()]
        self.learned += [rollout.request_id for rollout in rollouts]
        self.parts += 1
        if tokens := int(batch["loss_mask"].sum()):
            made = self.trainer.forward_backward(batch, policy.loss_call())
            self.tokens += tokens
            self.output.loss += made.loss
            self.output.num_micro_batches += made.num_micro_batches
            merge(self.output.metrics, made.metrics)

    @property
    def _unit(self) -> float:
        """The power of two next to the normalizer of a full batch: exact, and sums stay small enough for fp16."""
        config = self.trainer.config_now
        most = config.data.prompts_per_step * config.rollout.group_size
        tokens = most * config.rollout.max_response_tokens
        return 2.0 ** math.ceil(math.log2(normalizer(self.trainer.policy.aggregation[0], tokens, most)))

    def _step(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Divide gradient, loss and metrics by what the whole batch gives, and do the optimizer step."""
        trainer, policy, output = self.trainer, self.trainer.policy, self.output
        mask = (batch := trainer.batch(rollouts))["loss_mask"]
        tokens = int(mask.sum())
        self._check(rollouts, tokens)
        if not tokens:
            return {"actor/empty_updates": Sum(1.0)}
        sequences = int((batch.sum_by_sequence(mask.float()) > 0).sum())
        factor = self._unit / normalizer(policy.aggregation[0], tokens, sequences)
        trainer.groups["actor"].call("scale_gradients", factor=factor).result()
        output.loss *= factor
        output.metrics = {n: v if is_largest(n) else v / tokens for n, v in output.metrics.items()}
        metrics = trainer.learn([output], policy.loss_call(), check=policy.check)
        if self.penalty:
            metrics["reward/kl_penalty"] = sum(mean * count for mean, count in self.penalty) / len(rollouts)
        return (
            metrics
            | policy.settle(metrics, len(rollouts))
            | {
                "stream/parts": float(self.parts),
                "stream/overlap_share": self.overlapped / tokens,
                "time/stream_update": self.seconds,
            }
        )

    def _check(self, rollouts: Sequence[Rollout], tokens: int) -> None:
        """Refuse a gradient that is not the sum over these rollouts, each once, at the weights of the step.

        Raises:
            TrainingFailed: names the difference. The weights were left alone.
        """
        learned, wanted = Counter(self.learned), Counter(rollout.request_id for rollout in rollouts)
        if wrong := [id for id in learned | wanted if learned[id] != wanted[id]]:
            raise TrainingFailed(
                f"The gradient has other rollouts than the batch (rollout.stream_update), such as '{wrong[0]}': "
                f"{learned[wrong[0]]} times in the gradient, {wanted[wrong[0]]} times in the batch. The weights were left "
                "alone. This is a bug of the engine."
            )
        if tokens != self.tokens or self.trainer.weights_changed:
            what = f"is of {self.tokens} loss tokens, and the batch has {tokens}"
            what = "was added up over a change of the weights" if self.trainer.weights_changed else what
            raise TrainingFailed(
                f"The gradient {what} (rollout.stream_update). No step was done with it. This is a bug of the engine."
            )

    def _known(self, rollouts: list[Rollout]) -> tuple[list[Rollout], Known]:
        """Return the rollouts, and the outcomes of their rewards in the same order."""
        names = [scorer.config.name for scorer in self.trainer.rewards.scorers]
        outcomes = {name: [self.outcomes[r.request_id][name] for r in rollouts] for name in names}
        return rollouts, Known(outcomes, self.scoring)


def _taken(arrived: queue.SimpleQueue[Rollout], thread: SamplerThread) -> list[Rollout]:
    """Return what has arrived; wait for the first rollout.

    Raises:
        BaseException: the error that ended the sampling thread.
    """
    found: list[Rollout] = []
    while not found:
        with contextlib.suppress(queue.Empty):
            found.append(arrived.get(timeout=POLL_SECONDS))
        thread.check()
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(arrived.get_nowait())
    return found


def _update_problems(trainer: Trainer) -> Iterator[str]:
    """Yield why the update cannot be the sum of parts."""
    config, plan, plugins = trainer.config, trainer.policy.plan, trainer.plugins
    algorithm = f"algorithm.advantage = '{config.algorithm.advantage}'"
    if not trainer.samples or trainer.off_policy or config.rollout.over_sampling > 1:
        yield "the run learns from rollouts of earlier steps, or stops responses (trainer, rollout.over_sampling)"
    changed = [name for name in PARTS if getattr(type(trainer), name) is not getattr(Trainer, name)]
    if changed and "streams" not in vars(type(trainer)):
        yield f"trainer = '{config.trainer}' changes '{changed[0]}', and does not declare streams = True"
    if plan.needs("critic") or plan.greedy:
        yield f"{algorithm} needs {'a critic' if plan.needs('critic') else 'greedy responses'}"
    elif not getattr(plugins.spec("advantages", config.algorithm.advantage), "per_group", False):
        yield f"{algorithm} depends on the whole batch, or does not declare per_group"
    if plan.updates_per_step > 1:
        yield (
            f"a batch has {plan.updates_per_step} optimizer steps (algorithm.epochs, algorithm.mini_batch_prompts), "
            "and only a batch with one step can be learned from in parts"
        )
    steps = [config_at(config, step).algorithm for step in boundaries(config)]
    if any(each.top_entropy_quantile < 1 for each in steps):
        yield "algorithm.top_entropy_quantile is a quantile of the whole batch"
    if any(each.correction.normalize for each in steps):
        yield "algorithm.correction.normalize divides by a mean over the whole batch"
    for name in (*plan.measured, *plan.derived):
        yield f"the column '{name}' is computed for the whole batch"
    if config.stage:
        yield f"stage '{config.stage[0].name}' receives all rollouts of a step"
    if config.environment is not None:
        yield "episodes ([environment]) are not sampled as single responses"
    for scorer in trainer.rewards.scorers:
        if scorer.runner.signature is not None and scorer.runner.signature.whole_batch:
            yield f"reward '{scorer.config.name}' receives all samples of a step in one call"
    if not has_capability(plugins, "train_engines", config.actor.backend, "late_scale"):
        yield f"actor.backend = '{config.actor.backend}' has no capability 'late_scale'"


def _placement_problems(trainer: Trainer) -> Iterator[str]:
    """Yield why nothing can be learned while responses are sampled."""
    config = trainer.config
    places = [config.placement.pool_of(role) for role in ("actor", "rollout")]
    together = _in_one_process(trainer) or places[0] == places[1]
    if together and config.rollout.process is None:
        yield (
            "the sampler works in the actor's processes, one at a time: give it a separate process ([rollout.process]) or "
            "pool ([placement])"
        )
    if together and getattr(config.runtime.options, "offload_idle_roles", False):
        yield f"runtime.{config.runtime.backend}.offload_idle_roles gives memory to one of the two at a time"


def _in_one_process(trainer: Trainer) -> bool:
    """Return whether all workers but ``[rollout.process]`` are in the controller's process."""
    runtime = trainer.plugins.resolve("runtimes", trainer.config.runtime.backend)
    return bool(runtime.in_process)
