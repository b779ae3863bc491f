"""The names that the core offers: for each, its entry in a table and its option table.

The core registers them with the same hooks as a plugin does. ``engine_core.plugins.metadata`` lists them from these
hooks, so the core has no entry points. Nothing heavy is imported here: ``load`` is imported on first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from pydantic import Field

from engine_core.hooks import hookimpl
from engine_core.specs import (
    SAMPLING_SECTIONS,
    SHARED_SECTIONS,
    Advantage,
    Column,
    Command,
    Loss,
    Objective,
    Options,
    RuntimeSpec,
    TrainerSpec,
    TransportSpec,
)


class GRPOOptions(Options):
    """``[algorithm.grpo]``: options of the advantage estimator `grpo`."""

    normalize_by_std: bool = True
    """Divide by the group's standard deviation. ``false``: the advantage of Dr.GRPO."""
    epsilon: float = Field(1e-6, ge=0)
    """Constant added to the standard deviation before the division; TRL uses 1e-4."""


class GAEOptions(Options):
    """``[algorithm.gae]``: options of the advantage estimator `gae`."""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""
    lam: float = Field(1.0, ge=0, le=1)
    """Lambda of GAE. 1: use the whole return. 0: use only the next value."""
    whiten_batch: bool = True
    """Standardize the advantages over the sampled tokens of the batch."""


class ReinforceOptions(Options):
    """``[algorithm.reinforce]``: options of the advantage estimator `reinforce`."""

    gamma: float = Field(1.0, ge=0, le=1)
    """Discount per token."""


@hookimpl
def engine_advantages() -> Mapping[str, Advantage]:
    """Offer the core's advantage estimators."""
    whole, tokens = "engine_core.algorithms.advantages:", "engine_core.algorithms.advantages_tokens:"
    rewards = frozenset({"rewards"})
    apart = partial(Advantage, min_group_size=2, per_group=True)
    return {
        "batch_mean": Advantage(load=whole + "batch_mean", needs=rewards),
        "dr_grpo": apart(load=whole + "dr_grpo"),
        "gae": Advantage(
            load=tokens + "gae",
            config=GAEOptions,
            needs=rewards | {"values"},
            makes=frozenset({"advantages", "returns"}),
        ),
        "grpo": apart(load=whole + "grpo", config=GRPOOptions),
        "reinforce": Advantage(
            load=tokens + "reinforce", config=ReinforceOptions, needs=rewards, per_group=True
        ),
        "rloo": apart(load=whole + "rloo"),
    }


class PPOClipOptions(Options):
    """``[algorithm.ppo_clip]``: options of the policy loss `ppo_clip`."""

    clip_ratio: float = Field(0.2, ge=0)
    """Clip the probability ratio to 1 - `clip_ratio` and 1 + `clip_ratio`, unless the next two keys are set."""
    clip_ratio_low: float | None = Field(None, ge=0)
    """The lower bound of the ratio is 1 - `clip_ratio_low`; default: `clip_ratio`."""
    clip_ratio_high: float | None = Field(None, ge=0)
    """The upper bound of the ratio is 1 + `clip_ratio_high`; default: `clip_ratio`. A value above `clip_ratio_low` is DAPO's clip-higher."""
    clip_ratio_c: float | None = Field(None, gt=1)
    """Dual clip: for a negative advantage A the loss is at most `clip_ratio_c` * -A (https://arxiv.org/abs/1912.09729)."""
    delta: float | None = Field(None, gt=1)
    """Two-sided clip: upper bound of the ratio in the unclipped term (https://arxiv.org/abs/2505.07291)."""


@hookimpl
def engine_losses() -> Mapping[str, Loss]:
    """Offer the core's policy losses."""
    here = "engine_core.algorithms.losses:"
    return {
        "ppo_clip": Loss(load=here + "ppo_clip", config=PPOClipOptions),
        "reinforce": Loss(load=here + "reinforce", ratio=False),
    }


@hookimpl
def engine_trainers() -> Mapping[str, TrainerSpec]:
    """Offer the trainer ``rl``."""
    return {
        "rl": TrainerSpec(
            load="engine_core.train.trainer:Trainer",
            sections=SHARED_SECTIONS | SAMPLING_SECTIONS | {"ref", "critic", "teacher", "algorithm"},
            required=frozenset({"reward", "data"}),
        )
    }


@hookimpl
def engine_objectives() -> Mapping[str, Objective]:
    """Offer the core's objectives."""
    here = "engine_core.algorithms.objectives:"
    return {
        "nll": Objective(load=here + "nll"),
        "policy": Objective(load=here + "make_policy", factory=True),
        "value": Objective(load=here + "value_objective"),
    }


COLUMNS: Mapping[str, Column] = {
    "old_log_probs": Column(role="actor", output="log_probs"),
    "sum_pi_squared": Column(role="actor", output="sum_pi_squared"),
    "ref_log_probs": Column(role="ref", output="log_probs"),
    "teacher_log_probs": Column(role="teacher", output="log_probs"),
    "values": Column(role="critic", output="values"),
}
"""The columns that the core computes after the rollouts, in the order of computation."""


@hookimpl
def engine_columns() -> Mapping[str, Column]:
    """Offer the core's columns."""
    return COLUMNS


class LocalOptions(Options):
    """``[runtime.local]``: all workers in the controller's process."""

    offload_idle_roles: bool = False
    """Move gradients and optimizer state to host memory during sampling. Free the sampler's cache during training."""


@hookimpl
def engine_runtimes() -> Mapping[str, RuntimeSpec]:
    """Offer the runtime ``local``."""
    return {
        "local": RuntimeSpec(
            load="engine_core.local.runtime:LocalRuntime", config=LocalOptions, in_process=True
        )
    }


@hookimpl
def engine_weight_transports() -> Mapping[str, TransportSpec]:
    """Offer the weight transport ``same_process``."""
    return {
        "same_process": TransportSpec(
            load="engine_core.contracts.weight_sync:same_process", serves=frozenset({"colocated"})
        )
    }


@hookimpl
def engine_commands() -> Mapping[str, Command]:
    """Offer the core's commands."""
    return {name: Command(load=f"engine_core.cli.train:{name}") for name in ("train", "resume")}
