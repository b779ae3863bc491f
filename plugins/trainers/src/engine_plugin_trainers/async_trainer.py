"""The loop of ``trainer``, beside a sampler that runs ahead.

::

    thread "sampling":  prompts -> rollouts, with whatever weights the sampler has
    thread "scoring":   complete groups -> rewards
    main thread:        groups that are ready -> stages -> advantages -> update -> weight sync

The main thread consumes: rows of the data, groups that are ready; waits for: as many of these as a step takes, in
``update`` for the workers, in ``sync`` for the sampler to stand still; unblocked by: the scoring thread (or the sampling
one, where nothing is scored early), the workers' answers, the error of either thread, a signal; produces: requests for
the sampling thread, new weights, checkpoints. What the others do stands in ``engine_plugin_trainers.sampler_thread`` and
``engine_plugin_trainers.scoring_thread``.

A step is the step of ``trainer``: only where its rollouts come from differs (``engine_plugin_trainers.ahead_source``), and what
becomes of those in flight when the weights change. How far ahead, and why no token is older than `max_staleness`
versions, is in ``engine_plugin_trainers.ahead``. What staleness does to the gradient is corrected as ``[algorithm.correction]``
says: by default the policy ratio is to the weights before the step (``old_log_probs``), and each token is weighed by
the truncated ratio of these to the policy that sampled it, the decoupled objective of
https://arxiv.org/abs/2110.00641.

Left out on purpose: episodes (``[environment]``) and greedy baselines, which are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from engine_core.errors import ConfigError
from engine_core.tables import DISTRIBUTION
from engine_core.train.trainer import Trainer
from engine_plugin_trainers.ahead_source import AheadSource
from engine_plugin_trainers.cores import shared_cores

if TYPE_CHECKING:
    from pathlib import Path

    from engine_plugin_trainers.options import AsyncOptions

log = logging.getLogger("engine")

OF_THE_SAMPLER = tuple(f"rollout.{name}" for name in DISTRIBUTION)
"""Settings that a step's log-probs share with its rollouts."""
NEEDED = {"keep": "pause", "abort": "partial"}
"""Capability of the rollout engine that a way to deal with responses in flight needs."""


class AsyncTrainer(Trainer):
    """``rl`` with rollouts that run ahead by at most ``async.max_staleness`` policy versions.

    Args: as ``Trainer``.

    Raises:
        ConfigError: something of the run file cannot run ahead.
    """

    sampling: AheadSource

    def __init__(self, *args: Any, **live: Any) -> None:
        super().__init__(*args, **live)
        if self.ahead and (found := list(self._problems())):
            raise ConfigError(found)

    @property
    def options(self) -> AsyncOptions:
        """``[async]``."""
        options: AsyncOptions = self.config.options
        return options

    @property
    def ahead(self) -> bool:
        """Whether anything is sampled ahead; without it the run is that of ``rl``."""
        return self.options.max_staleness > 0

    @property
    def off_policy(self) -> bool:
        return self.ahead or super().off_policy

    @property
    def weight_updates(self) -> str:
        """``drain``, ``abort`` or ``keep``."""
        wanted = self.options.weight_updates
        return ("keep" if self._can("pause") else "drain") if wanted == "auto" else wanted

    def prepare(self) -> None:
        super().prepare()
        if self.ahead and self.samples_greedy:
            raise ConfigError(
                f"algorithm.advantage = '{self.config.algorithm.advantage}' compares with a greedy response of the same "
                "policy, which a sampler that runs ahead does not have any more. Set async.max_staleness = 0, or use another."
            )
        correction = self.config.algorithm.correction
        if self.ahead and correction.level == "off" and not correction.bypass:
            log.warning(
                "algorithm.correction.level = 'off': what is sampled ahead is learned from as if the present policy had "
                "sampled it."
            )
        process = self.config.rollout.process
        runtime = self.plugins.resolve("runtimes", self.config.runtime.backend)
        if process and self.ahead and self.training and runtime.in_process:
            self._cleanup.enter_context(shared_cores(1 + process.engines))

    def make_sampling(self) -> AheadSource:
        return AheadSource(self)

    def start(self) -> None:
        super().start()
        if self.ahead and self.training:
            if self.runtime.shared:
                raise ConfigError(self._shared())
            self._cleanup.callback(self.sampling.end)  # before the workers are closed
            self.sampling.begin()

    def state(self) -> dict[str, Any]:
        holds = self.ahead or bool(self.sampling.returned)
        return super().state() | ({"ahead": self.sampling.ahead_state()} if holds else {})

    def files(self) -> Mapping[str, Callable[[Path], object]]:
        return {**super().files(), **(self.sampling.ahead_files() if self.ahead else {})}

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        super().load_state(state, folder)
        if self.training and (self.ahead or "ahead" in state):
            self.sampling.load_ahead(state.get("ahead"), folder)

    # -- what cannot run ahead ----------------------------------------------

    def _problems(self) -> Iterator[str]:
        config, remedy = self.config, "or async.max_staleness = 0"
        if config.environment is not None:
            yield f"environment: episodes cannot be sampled ahead yet. Take the table out, {remedy}."
        if config.rollout.over_sampling > 1:
            yield (
                "rollout.over_sampling: a step that learns from what was sampled ahead waits for no straggler. Remove it, "
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
                f"runtime.{config.runtime.backend}.offload_idle_roles: the sampler works while the trainer does, so neither can "
                f"give its memory to the other. Set it to false, place them in pools of their own, {remedy}."
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
        """Whether actor and sampler are in one pool."""
        placement = self.config.placement
        return len(placement.pools) < 2 or placement.actor == placement.rollout

    def _can(self, capability: str) -> bool:
        """Whether the sampler declares it."""
        spec: Any = self.plugins.spec("rollout_engines", self.config.rollout.backend)
        return capability in spec.capabilities

    def _would_share(self) -> bool:
        """Whether a sampler in the actor's process may use its module, as `rollout.weights` stands."""
        trainer: Any = self.plugins.spec("train_engines", self.config.actor.backend)
        sampler: Any = self.plugins.spec("rollout_engines", self.config.rollout.backend)
        both = "generation_module" in trainer.capabilities and "share_module" in sampler.capabilities
        return both and self.config.rollout.weights != "own"

    def _shared(self) -> str:
        return (
            "async: the sampler uses the actor's own module, so it cannot sample while that is trained. Give it a process "
            'of its own ([rollout.process]), a pool of its own ([placement]), or weights of its own (rollout.weights = "own").'
        )
