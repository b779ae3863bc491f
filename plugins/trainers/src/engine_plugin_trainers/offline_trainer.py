"""Offline RL: the policy update of ``rl`` on stored rollouts, of this model or another one.

Advantages, losses, correction, KL and critic are those of ``[algorithm]``. Every token counts as sampled by an older
policy. A sampler is built only if ``[eval]`` asks for scores.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from engine_core.config.evaluation import held_out_sets
from engine_core.data import PromptSource, tokenizer_hash
from engine_core.errors import ConfigError
from engine_core.rewards.runner import reward_statistics
from engine_core.train.rollouts import Rounds
from engine_core.train.trainer import Trainer
from engine_plugin_trainers.data.stored import Fit, StoredGroups

if TYPE_CHECKING:
    from pathlib import Path

    from engine_core.contracts.runtime import Role
    from engine_core.types import Batch, Prompt, Rollout


class OfflineTrainer(Trainer):
    """The trainer ``offline``: the update of ``rl`` on rollouts from files.

    ``[data] train`` names files of rollouts, folders of such files, and runs; `prompts_per_step` counts groups.
    """

    off_policy = True
    samples = False

    @property
    def evaluates(self) -> bool:
        """Whether ``[eval]`` asks for scores, which need a sampler."""
        return bool(self.config.eval.during_training)

    @property
    def scores(self) -> bool:  # type: ignore[override]
        """Whether rewards are computed: only in evaluation, because stored rollouts have theirs."""
        return self.evaluates

    def make_source(self) -> StoredGroups:
        """Open the stored rollouts and check that they fit the run.

        Raises:
            ConfigError: the run was given data as objects.
        """
        if "data" in self.live:
            raise ConfigError("data: trainer 'offline' reads files of rollouts. Name them in data.train.")
        # the tokenizer's size if a plugin builds the model
        vocabulary = len(self.tokenizer) if self.text_config is None else int(self.text_config.vocab_size)
        fit = Fit(
            tokenizer=tokenizer_hash(self.tokenizer),
            vocabulary=vocabulary,
            temperature=self.config.rollout.temperature,
            greedy="greedy_rewards" in self.plugins.spec("advantages", self.config.algorithm.advantage).needs,  # type: ignore[attr-defined]
        )
        return StoredGroups(self.config.data, self.config.run.seed, fit)

    def rollouts(self, step: int) -> tuple[list[Rollout], dict[str, float]]:
        """Read the groups of a step; stages that refill take further groups."""
        rounds = Rounds(self.config_now, self.stages, step)
        while groups := self.source.take(rounds.missing):
            read = [
                dataclasses.replace(rollout, group_id=number)
                for number, group in enumerate(groups, rounds.groups)
                for rollout in group
            ]
            rounds.add(read, _stored_rewards(read))
        return rounds.finish(self.describe(rounds.sampled))

    def describe(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return metrics of the rollouts without ``tokens/generated``."""
        described = super().describe(rollouts)
        del described["tokens/generated"]
        return described

    def reward_terms(self) -> Iterator[tuple[str, float, Callable[[float], float]]]:
        """Yield name, weight and clipping function from ``[[reward]]``, which need not be built."""
        for reward in self.config.reward:
            yield reward.name, reward.weight, reward.clipped

    def fresh(self, batch: Batch) -> dict[str, torch.Tensor]:
        """Return ``fresh`` [T] bool, False on all tokens."""
        return {"fresh": torch.zeros(batch.num_tokens, dtype=torch.bool)}

    def push_weights(self, updated: bool) -> dict[str, float]:
        """Send the actor's weights to the sampler if one exists; count the policy version."""
        if "rollout" in self.groups:
            return super().push_weights(updated)
        self.version += updated
        return {"policy_version": float(self.version)}

    def reward_columns(self) -> set[str]:
        """Return the columns of the held-out sets."""
        columns: set[str] = set()
        for held_out in held_out_sets(self.config):
            rows = self.given.held_out(held_out)
            data = held_out.data(self.config)
            with closing(PromptSource(data, self.tokenizer, 0, "validation", rows)) as source:
                columns |= source.columns()
        return columns

    def reward_rows(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Return no rows: stored rollouts have their rewards."""
        return ()  # rows of held-out sets are checked when the sets are read

    def roles(self, training: bool) -> dict[str, Role]:
        """Return the roles of ``rl``; the sampler only for evaluation."""
        return {
            name: role
            for name, role in super().roles(training).items()
            if name != "rollout" or self.evaluates
        }

    def start(self) -> None:
        """Start the sampler if the run evaluates."""
        if self.evaluates:
            super().start()

    def generate(self, prompts: list[Prompt]) -> list[Rollout]:
        """Refuse to sample.

        Raises:
            ConfigError: always.
        """
        raise ConfigError("trainer = 'offline' samples nothing. Use a file with trainer = \"rl\".")

    def evaluate(self, out: Path | None = None) -> dict[str, float]:
        """Score the held-out sets.

        Raises:
            ConfigError: the run has no sampler.
        """
        if not self.evaluates:
            raise ConfigError(
                "trainer = 'offline' has a sampler only if [eval] asks for scores. Add --set eval.at_end=true, "
                "with [[reward]] and data.validation in the file."
            )
        return super().evaluate(out)

    def derived(self) -> list[str]:
        """Return the derived numbers, in groups of stored rollouts."""
        config = self.config
        return [
            f"{self.total_steps} steps of {config.data.prompts_per_step} groups ({len(self.source)} in data.train),",
            f"{self.optimizer_steps_per_step} optimizer step(s) each, {self.optimizer_steps(self.total_steps)} in all,",
            config.actor.micro_batch,
        ]


def _stored_rewards(rollouts: list[Rollout]) -> dict[str, float]:
    """Return metrics of the rewards that stored rollouts have."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.rewards)
    values = {name: [v for r in rollouts if (v := r.rewards.get(name)) is not None] for name in names}
    means = {f"reward/{name}": statistics.fmean(held) for name, held in values.items() if held}
    return means | reward_statistics(rollouts)
