"""The columns that an algorithm needs and what computes them, planned before anything is built.

A loss and an advantage estimator declare columns. Some come with every rollout, one is sampled for it
(``greedy_rewards``), some are computed after the rollouts (``COLUMNS`` and those of plugins), the advantages come from
the estimator. A column that nothing computes is refused here, by name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from engine_core.builtin import COLUMNS
from engine_core.config.schedule import boundaries, config_at
from engine_core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from engine_core.config import AlgorithmConfig, EngineConfig
    from engine_core.plugins import PluginSet
    from engine_core.specs import Advantage, Column, Loss

ROLLOUT_COLUMNS = frozenset(
    {
        "loss_mask",
        "rollout_log_probs",
        "policy_versions",
        "rewards",
        "group_ids",
        "response_lengths",
        "truncated",
        "valid",
        "reward_terms",
    }
)
"""In every batch (``SampledRun.batch``), besides ``reward/NAME``. ``reward_terms`` stands for the
columns ``reward_term/NAME`` and ``reward_weight/NAME`` of each reward that has a weight."""

GREEDY = "greedy_rewards"
"""Sampled and scored for an estimator that needs it: one more response a prompt, at temperature 0."""

OUTPUTS = frozenset({"log_probs", "entropy", "sum_pi_squared"})
"""What a train engine can compute for a loss."""

COLUMN_OUTPUTS = {
    "": {""},
    **dict.fromkeys(("actor", "ref", "teacher"), OUTPUTS),
    "critic": {"values", "scores"},
}
"""Outputs of each role's ``infer`` that may be a column; without a role the column's function computes it."""

MEASURED = {"current_log_probs": "log_probs", "current_entropy": "entropy"}
"""Column -> the actor's output that it is; made for each mini-batch just before its update."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of a step for its algorithm."""

    columns: tuple[str, ...]  # to be made by `infer`, in the order of ``producers``
    outputs: tuple[str, ...]  # computed with gradient
    updates_per_step: int  # optimizer steps for one batch of rollouts; of a whole run, their maximum
    greedy: bool = False  # one greedy response a prompt is sampled and scored
    measured: tuple[str, ...] = ()  # to be made for each mini-batch before its update
    derived: tuple[str, ...] = ()  # to be computed from other columns, each after those that it reads
    producers: Mapping[str, Column] = field(default_factory=lambda: COLUMNS)

    def columns_for(self, group_ids: Tensor, algorithm: AlgorithmConfig) -> tuple[str, ...]:
        """Return ``columns``, and ``old_log_probs`` if a stage made so many groups that there is more than one update.

        With `correction.bypass` the old log-probs are the sampler's: nothing is computed.

        Args:
            group_ids: [B] group of each rollout.
            algorithm: ``[algorithm]``.
        """
        if algorithm.correction.bypass:
            return tuple(column for column in self.columns if column != "old_log_probs")
        updates = updates_in(algorithm, len(group_ids.unique()))
        added = updates > 1 and "old_log_probs" not in self.columns
        return (("old_log_probs",) if added else ()) + self.columns

    def inferred(self, group_ids: Tensor, algorithm: AlgorithmConfig) -> dict[str, dict[str, str]]:
        """Return, by role, which column is which output of its ``infer``: one call per role.

        Args:
            group_ids: [B] group of each rollout.
            algorithm: ``[algorithm]``.
        """
        calls: dict[str, dict[str, str]] = {}
        for column in self.columns_for(group_ids, algorithm):
            made = self.producers[column]
            calls.setdefault(made.role, {})[column] = made.output
        return calls

    def needs(self, role: str) -> bool:
        """Return whether the model of a role must be built, because it computes a column."""
        return any(self.producers[column].role == role for column in self.columns)


def producers_of(plugins: PluginSet, advantage: Advantage, loss: Loss) -> dict[str, Column]:
    """Return the core's columns and those of plugins that an algorithm needs, each after the columns that it reads.

    Raises:
        PluginError: a plugin that offers a needed column is broken.
        ConfigError: columns need each other in a circle.
    """
    found: dict[str, Column] = dict(COLUMNS)

    def add(name: str, wanted_by: tuple[str, ...]) -> None:
        """Add a column and what it needs; raise ``ConfigError`` if a column needs itself."""
        if name in wanted_by:
            raise ConfigError(f"The column '{name}' needs itself, by way of {' and '.join(wanted_by)}.")
        if name in found or name in ROLLOUT_COLUMNS or (spec := plugins.offered("columns", name)) is None:
            return
        column = cast("Column", spec)
        for read in sorted(column.needs):
            add(read, (*wanted_by, name))
        found[name] = column

    for name in sorted({*advantage.needs, *loss.needs}):
        add(name, ())
    return found


def plan_run(
    config: EngineConfig, advantage: Advantage, loss: Loss, producers: Mapping[str, Column] = COLUMNS
) -> Plan:
    """Return a plan that serves every step of a run, even if ``[schedule]`` changes what its algorithm needs.

    Args:
        config: the run's config.
        advantage: its advantage estimator.
        loss: its policy loss.
        producers: the columns that can be computed, see ``producers_of``.

    Raises:
        ConfigError: a column that nothing computes.
    """
    configs = [config_at(config, step) for step in boundaries(config)]
    plans = [plan(c.algorithm, advantage, loss, c.data.prompts_per_step, producers) for c in configs]
    made = {column for each in plans for column in each.columns}
    outputs = dict.fromkeys(output for each in plans for output in each.outputs)
    return Plan(
        tuple(c for c in producers if c in made),
        tuple(outputs),
        max(each.updates_per_step for each in plans),
        any(each.greedy for each in plans),
        tuple(c for c in MEASURED if any(c in each.measured for each in plans)),
        plans[0].derived,
        producers,
    )


def updates_in(algorithm: AlgorithmConfig, groups: int) -> int:
    """Return the optimizer steps for a batch of ``groups`` groups."""
    return algorithm.epochs * -(-groups // (algorithm.mini_batch_prompts or max(groups, 1)))


def optimizer_steps(config: EngineConfig, steps: int) -> int:
    """Return the planned optimizer steps of the first ``steps`` steps of a run; stages may enlarge batches."""
    growth = math.prod(getattr(stage.options, "growth", 1.0) for stage in config.stage)
    groups = round(config.data.prompts_per_step * growth)
    starts = [*(start for start in boundaries(config) if start <= steps), steps + 1]
    return sum(
        (end - start) * updates_in(config_at(config, start).algorithm, groups)
        for start, end in itertools.pairwise(starts)
    )


def plan(
    algorithm: AlgorithmConfig,
    advantage: Advantage,
    loss: Loss,
    prompts_per_step: int,
    producers: Mapping[str, Column] = COLUMNS,
) -> Plan:
    """Return the columns and outputs of an algorithm.

    ``old_log_probs`` are computed only if the policy moves while they are needed: more than one optimizer step on the
    same rollouts, or a KL in the reward. Otherwise the ratio of the only update is exactly 1 and its log-probs are
    those of the training forward pass.

    Raises:
        ConfigError: a column that nothing computes.
    """
    updates = updates_in(algorithm, prompts_per_step)
    needed = set(advantage.needs) | (set(loss.needs) - {"advantages"})
    if algorithm.kl_coef > 0:
        needed.add("ref_log_probs")
    if algorithm.top_entropy_quantile < 1:
        needed.add("current_entropy")
    if algorithm.correction.normalize:
        needed.add("current_log_probs" if algorithm.correction.bypass else "old_log_probs")
    if updates > 1 or (algorithm.kl_coef > 0 and algorithm.kl_in == "reward"):
        needed.add("old_log_probs")
    for name in reversed(list(producers)):  # a column stands after those that it reads
        needed |= producers[name].needs if name in needed else frozenset()
    derived = [name for name in producers if name in needed and not producers[name].role]
    values = [name for name in producers if name in needed and producers[name].role == "critic"]
    problems = list(_missing(algorithm, advantage, loss, producers))
    problems += _impossible(algorithm, advantage, loss, values)
    if problems:
        raise ConfigError(problems)
    weighs_entropy = algorithm.entropy_coef or algorithm.entropy_target is not None
    outputs = tuple(dict.fromkeys([*loss.outputs, *(["entropy"] if weighs_entropy else [])]))
    measured = tuple(column for column in MEASURED if column in needed)
    made = tuple(c for c in producers if c in needed and producers[c].role)
    return Plan(made, outputs, updates, GREEDY in needed, measured, tuple(derived), producers)


def _missing(
    algorithm: AlgorithmConfig, advantage: Advantage, loss: Loss, producers: Mapping[str, Column]
) -> Iterator[str]:
    """Yield a problem for each column and output that nothing computes."""
    made = ROLLOUT_COLUMNS | set(producers)
    chosen = (
        ("advantage", algorithm.advantage, advantage, made | {GREEDY}),
        ("loss", algorithm.loss, loss, made | set(MEASURED) | advantage.makes),
    )
    for key, name, spec, known in chosen:
        for column in sorted(c for c in spec.needs - known if not c.startswith("reward/")):
            yield (
                f"algorithm.{key} = '{name}' needs the column '{column}', which nothing in this run makes."
                + did_you_mean(column, known)
            )
    for name, producer in producers.items():
        for read in sorted(c for c in producer.needs - made - {GREEDY} if not c.startswith("reward/")):
            why = "which nothing in this run makes."
            yield f"The column '{name}' needs '{read}', {why}{did_you_mean(read, made)}"
        if producer.output not in COLUMN_OUTPUTS.get(producer.role, ()):
            got = f"role = '{producer.role}' and output = '{producer.output}'"
            yield f"The column '{name}' has {got}, which no train engine computes."
    for output in (output for output in loss.outputs if output not in OUTPUTS):
        yield (
            f"algorithm.loss = '{algorithm.loss}' needs the output '{output}', which no train engine computes."
            + did_you_mean(output, OUTPUTS)
        )


def _impossible(
    algorithm: AlgorithmConfig, advantage: Advantage, loss: Loss, values: Sequence[str]
) -> Iterator[str]:
    """Yield settings that exclude each other; ``values``: the needed columns that the critic gives."""
    if values and "values" not in advantage.needs | loss.needs:
        yield (
            f"The column '{values[0]}' comes from the critic, which learns only where an estimator uses it: "
            f"algorithm.advantage = '{algorithm.advantage}' must need 'values' itself and make 'returns', as gae does."
        )
    if "values" in advantage.needs | loss.needs and "returns" not in advantage.makes:
        yield (
            f"algorithm.advantage = '{algorithm.advantage}' makes no column 'returns', which the critic learns from. "
            "Its spec says makes = {'advantages', 'returns'} where it gives both, as gae does."
        )
    if algorithm.kl_coef > 0 and algorithm.kl_in == "reward" and "rewards" not in advantage.needs:
        yield (
            f"algorithm.kl_in = 'reward' subtracts the KL from the sum of the rewards, which algorithm.advantage = "
            f"'{algorithm.advantage}' does not read. Set algorithm.kl_in = 'loss'."
        )
    correction = algorithm.correction
    if correction.bypass and loss.ratio and correction.level in ("token", "sequence"):
        yield (
            f"algorithm.correction.level = '{correction.level}' would weigh tokens twice: with correction.bypass the ratio of "
            f"algorithm.loss = '{algorithm.loss}' already corrects for the sampler. Remove one of the two."
        )
