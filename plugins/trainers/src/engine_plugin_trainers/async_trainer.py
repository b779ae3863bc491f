"""The loop of ``trainer`` with a sampler that runs ahead.

::

    thread "sampling":  prompts -> rollouts, with the sampler's current weights
    thread "scoring":   complete groups -> rewards
    main thread:        ready groups -> stages -> advantages -> update -> weight sync

The main thread consumes: rows of the data, ready groups; waits for: the groups of a step, the workers in ``update``,
the paused sampler in ``sync``; unblocked by: the scoring thread (or the sampling thread, if no reward is scored early),
the workers' results, the error of either thread, a signal; produces: requests for the sampling thread, new weights,
checkpoints. ``engine_plugin_trainers.sampler_thread`` and ``engine_plugin_trainers.scoring_thread`` describe the other
threads.

A step is the step of ``trainer`` except for the source of its rollouts (``engine_plugin_trainers.ahead_groups``) and
the treatment of responses in flight when the weights change. ``engine_plugin_trainers.ahead`` bounds how far the
sampler runs ahead and proves that no token is older than `max_staleness` versions. ``[algorithm.correction]`` corrects
for staleness. By default the policy ratio is to the weights before the step (``old_log_probs``), and each token is
weighted by the truncated ratio of these weights to the policy that sampled it: the decoupled objective of
https://arxiv.org/abs/2110.00641.

With an environment the requests are episodes (``[environment]``): they run ahead like responses, and new weights come
between two of their tokens.

Left out on purpose: greedy baselines, which are refused.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine_core.errors import ConfigError, TrainingFailed
from engine_core.tables import DISTRIBUTION
from engine_core.train.capabilities import has_capability
from engine_core.train.trainer import Trainer
from engine_plugin_trainers.ahead_groups import AheadGroups
from engine_plugin_trainers.cores import shared_cores

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from engine_core.types import Batch, Prompt, Rollout
    from engine_plugin_trainers.options import AsyncOptions

log = logging.getLogger("engine")

OF_THE_SAMPLER = tuple(f"rollout.{name}" for name in DISTRIBUTION)
"""Settings that must be the same for a step's log-probs and its rollouts."""
NEEDED = {"keep": "pause", "abort": "partial"}
"""`async.weight_updates` -> capability of the rollout engine that it needs."""


class AsyncTrainer(Trainer):
    """The trainer ``rl`` with rollouts that run ahead by at most ``async.max_staleness`` policy versions.

    Args: as ``Trainer``.

    Raises:
        ConfigError: the run file has settings that do not allow sampling ahead.
    """

    def __init__(self, *args: Any, **live: Any) -> None:
        super().__init__(*args, **live)
        if self.runs_ahead and (found := list(self._problems())):
            raise ConfigError(found)

    @property
    def options(self) -> AsyncOptions:
        """Options of ``[async]``."""
        options: AsyncOptions = self.config.options
        return options

    @property
    def runs_ahead(self) -> bool:
        """Whether rollouts are sampled ahead; otherwise the run is that of ``rl``."""
        return self.options.max_staleness > 0

    @property
    def off_policy(self) -> bool:
        """Whether tokens of older policies come into the update: always when sampling ahead."""
        return self.runs_ahead or super().off_policy

    @property
    def weight_updates(self) -> str:
        """Treatment of responses in flight when weights change: ``drain``, ``abort`` or ``keep``."""
        wanted = self.options.weight_updates
        return ("keep" if self._can("pause") else "drain") if wanted == "auto" else wanted

    def prepare(self) -> None:
        """Refuse greedy baselines, and share the cores with a sampler process on CPU.

        Raises:
            ConfigError: the advantage estimator needs greedy responses.
        """
        super().prepare()
        self.ahead = AheadGroups(self.settings, self.sampler, self.options, self.clock)
        if self.runs_ahead and self.samples_greedy:
            raise ConfigError(
                f"algorithm.advantage = '{self.config.algorithm.advantage}' compares with a greedy response of the same "
                "policy, which a sampler that runs ahead no longer has. Set async.max_staleness = 0, or use another "
                "estimator."
            )
        correction = self.config.algorithm.correction
        if self.runs_ahead and correction.level == "off" and not correction.bypass:
            log.warning(
                "algorithm.correction.level = 'off': rollouts that were sampled ahead are used as if the current policy "
                "had sampled them."
            )
        process = self.config.rollout.process
        runtime = self.plugins.resolve("runtimes", self.config.runtime.backend)
        if process and self.runs_ahead and self.training and runtime.in_process:
            self._cleanup.enter_context(shared_cores(1 + process.engines))

    def start(self) -> None:
        """Start to sample ahead, if the run trains.

        Raises:
            ConfigError: the sampler shares its module with the actor.
        """
        super().start()
        if not (self.runs_ahead and self.training):
            return
        if self.runtime.shared:
            raise ConfigError(self._shared())
        config, rewards = self.config.rollout, self.rewards
        early = config.overlap_rewards and config.group_size > 1 and rewards.in_parts()
        self._cleanup.callback(self.ahead.end)  # before the workers are closed
        self.ahead.begin(self.groups["rollout"], rewards if early else None)
        assert self.ahead.thread is not None
        self.sampler.stream = self.ahead.thread.stream  # an evaluation samples next to the groups ahead

    def draw(self, wanted: int, step: int, first_group: int) -> tuple[list[Rollout], Any]:
        """Take the groups of a round, which were sampled and perhaps scored ahead; admit others."""
        if self.ahead.thread is None:
            return super().draw(wanted, step, first_group)
        left = (self.total_steps - step) * self.ahead.per_step
        groups = self.ahead.take(step, wanted, left, self.source.take)
        found: list[Rollout] = []
        for number, group in enumerate(groups, first_group):
            for rollout in group.in_order():
                # a copy, because the group may still be written to a checkpoint
                given = dict(rollout.rewards)  # by an environment
                found.append(dataclasses.replace(rollout, group_id=number, rewards=given, answers={}))
        self._check_staleness(found)
        self.sampler.settle(found)
        return found, self.ahead.known(groups)

    def take_prompts(self, count: int) -> list[Prompt]:
        """Return prompts; those that an earlier attempt had already taken from the data come first."""
        again = [group.prompt for group in self.ahead.again(count)]
        return [*again, *super().take_prompts(count - len(again))]

    def score(
        self,
        rollouts: list[Rollout],
        step: int,
        training: bool = True,
        early: Any = None,
        names: Collection[str] = (),
    ) -> dict[str, float]:
        """Fill in the rewards while the scoring thread is not using the reward workers."""
        with self.ahead.turn():
            return super().score(rollouts, step, training, early, names)

    def rollouts(self, step: int) -> tuple[list[Rollout], dict[str, float]]:
        """Take and score the groups of a step, and measure how old they are."""
        rollouts, metrics = super().rollouts(step)
        if self.ahead.thread is not None and self.recorded is None:
            metrics |= self.ahead.metrics() | self._staleness(rollouts)
        return rollouts, metrics

    def fresh(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return ``fresh`` [T] bool, True on tokens of the policy that is trained now; {} if all tokens are."""
        if self.ahead.thread is None:
            return super().fresh(batch)
        fresh = batch["policy_versions"] == self.version
        return {} if bool((fresh | ~batch["loss_mask"]).all()) else {"fresh": fresh}

    def push_weights(self, updated: bool) -> dict[str, float]:
        """Send the actor's weights to the sampler; responses in flight are treated as `async.weight_updates` says."""
        if self.ahead.thread is None:
            return super().push_weights(updated)
        start = self.clock.now()
        with self.ahead.thread.updating(self.weight_updates):
            waited = self.clock.now() - start
            return super().push_weights(updated) | {"time/sync_wait": waited}

    def _check_staleness(self, rollouts: Sequence[Rollout]) -> None:
        """Check that no token is older than the rule of ``ahead`` allows.

        Raises:
            TrainingFailed: a token is too old.
        """
        most = self.options.max_staleness
        ages, starts = self._ages(rollouts)
        for rollout, age in zip(rollouts, np.maximum.reduceat(ages, starts) if rollouts else (), strict=True):
            if age > most:
                raise TrainingFailed(
                    f"Rollout '{rollout.request_id}' has a token that is {age} policy versions old "
                    f"(async.max_staleness = {most}). The weights were left alone. This is a bug of the sampler or of the engine."
                )

    def _staleness(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return metrics of the age in versions of a step's tokens."""
        ages, starts = self._ages(rollouts)
        sampled = ages >= 0
        if not sampled.any():
            return {"async/staleness_mean": 0.0, "async/staleness_max": 0.0, "async/mixed_version_share": 0.0}
        most = ages.max()
        oldest = np.maximum.reduceat(ages, starts)
        newest = np.minimum.reduceat(np.where(sampled, ages, most), starts)
        return {
            "async/staleness_mean": float(ages.mean(dtype=np.float64, where=sampled)),
            "async/staleness_max": float(most),
            "async/mixed_version_share": np.count_nonzero(newest < oldest) / len(rollouts),
        }

    def _ages(self, rollouts: Sequence[Rollout]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return each token's age in versions, [T] int32, -1 where not sampled, and each rollout's first index, [N] int64."""
        if not rollouts:
            return np.empty(0, np.int32), np.empty(0, np.int64)
        versions = torch.cat([rollout.policy_versions for rollout in rollouts]).numpy()
        sampled = torch.cat([rollout.loss_mask for rollout in rollouts]).numpy()
        ends = np.cumsum([rollout.token_ids.numel() for rollout in rollouts])
        return np.where(sampled, self.version - versions, np.int32(-1)), np.concatenate([[0], ends[:-1]])

    def state(self) -> dict[str, Any]:
        """Return the state of ``rl`` and the queue."""
        holds = self.runs_ahead or bool(self.ahead.returned)
        return super().state() | ({"ahead": self.ahead.state()} if holds else {})

    def files(self) -> Mapping[str, Callable[[Path], object]]:
        """Return the writers of ``rl`` and that of the queued responses."""
        return {**super().files(), **(self.ahead.files(self.about()) if self.runs_ahead else {})}

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        """Restore the state of ``rl`` and the queue."""
        super().load_state(state, folder)
        if self.training and (self.runs_ahead or "ahead" in state):
            self.ahead.load(state.get("ahead"), folder, self.step_done)

    # -- what cannot run ahead ----------------------------------------------

    def _problems(self) -> Iterator[str]:
        """Yield a message for each setting that does not allow sampling ahead."""
        config, remedy = self.config, "or async.max_staleness = 0"
        if config.rollout.over_sampling > 1:
            yield (
                "rollout.over_sampling: rollouts are sampled ahead, so no step waits for a straggler. Remove it, "
                f"{remedy}."
            )
        for key in OF_THE_SAMPLER:
            if key in config.schedule:
                yield (
                    f"schedule.'{key}': rollouts are sampled ahead, and the step that learns from them would compute "
                    f"log-probs of another distribution. Leave it constant, {remedy}."
                )
        if self._together() and getattr(config.runtime.options, "offload_idle_roles", False):
            yield (
                f"runtime.{config.runtime.backend}.offload_idle_roles: the sampler and the trainer work at the same time, so "
                f"neither can be offloaded. Set it to false, place them in separate pools, {remedy}."
            )
        if self._together() and config.rollout.process is None and self._would_share():
            yield self._shared()
        wanted = self.options.weight_updates
        if (capability := NEEDED.get(wanted)) and not self._can(capability):
            yield (
                f"async.weight_updates: got '{wanted}', but rollout backend '{config.rollout.backend}' has no capability "
                f"'{capability}'. Use 'drain' or 'auto'."
            )

    def _together(self) -> bool:
        """Return whether actor and sampler are in one pool."""
        placement = self.config.placement
        return len(placement.pools) < 2 or placement.actor == placement.rollout

    def _can(self, capability: str) -> bool:
        """Return whether the sampler declares the capability."""
        return has_capability(self.plugins, "rollout_engines", self.config.rollout.backend, capability)

    def _would_share(self) -> bool:
        """Return whether a sampler in the actor's process may use the actor's module, given `rollout.weights`."""
        backend = self.config.actor.backend
        lends = has_capability(self.plugins, "train_engines", backend, "generation_module")
        return lends and self._can("share_module") and self.config.rollout.weights != "own"

    def _shared(self) -> str:
        """Return the message for a sampler that shares its module with the actor."""
        return (
            "async: the sampler uses the actor's own module, so it cannot sample while the actor trains. Give it a "
            'separate process ([rollout.process]), a separate pool ([placement]), or separate weights (rollout.weights = "own").'
        )
