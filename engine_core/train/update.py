"""The updates of a step: those of the policy and, if the algorithm needs one, of the critic.

Policy: mini-batches and their columns, the objective, and the adaptive coefficients. The trainer decides when to
update; this module defines the update.

Critic (PPO): ``values[t]`` is the return expected before token t is sampled, computed from the hidden state of the
previous token. The critic's loss is the mean over the sampled tokens of the mini-batch, independent of
`algorithm.loss_aggregation`: it is a regression with one row per token.

Left out: the use of the values. The advantage estimator (``gae``) reads them and also gives the returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from engine_core.algorithms.correction import Correction, normalizing_scale
from engine_core.algorithms.objectives import with_weights
from engine_core.algorithms.regularizers import AdaptiveEntropy, AdaptiveKL, high_entropy
from engine_core.config import requirements
from engine_core.config.schedule import boundaries, config_at
from engine_core.contracts.runtime import Role
from engine_core.errors import ConfigError, PluginError, TrainingFailed
from engine_core.metrics import Sum, over_updates
from engine_core.types import LossCall

if TYPE_CHECKING:
    from engine_core.config import AlgorithmConfig
    from engine_core.config.roles import CriticConfig
    from engine_core.contracts.runtime import WorkerGroup
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.specs import Advantage, Loss
    from engine_core.train.settings import Settings
    from engine_core.types import Batch

OWN_KEYS = {"bypass", "normalize", "max_masked_share", "min_effective_sample_share", "support"}
"""Of ``[algorithm.correction]``: what is done here, not in the objective."""


class PolicyUpdate:
    """The update of the policy from one batch of rollouts.

    Args:
        settings: of the run.
        plugins: offer loss and advantage estimator.
        groups: worker groups by role; ``actor`` is in it when a mini-batch is updated.
        one_policy: returns whether the policy that is updated has sampled all rollouts of a step.

    Raises:
        PluginError: the loss cannot be called.
    """

    def __init__(
        self,
        settings: Settings,
        plugins: PluginSet,
        groups: Mapping[str, WorkerGroup],
        one_policy: Callable[[], bool],
    ) -> None:
        self.settings, self.groups, self.one_policy = settings, groups, one_policy
        config, algorithm = settings.config, settings.config.algorithm
        advantage = cast("Advantage", plugins.spec("advantages", algorithm.advantage))
        self.loss = cast("Loss", plugins.spec("losses", algorithm.loss))
        plugins.function("losses", algorithm.loss)  # refuses a bad loss here, before a worker resolves it
        producers = requirements.producers_of(plugins, advantage, self.loss)
        self.plan = requirements.plan_run(config, advantage, self.loss, producers)
        steps = [config_at(config, step).algorithm for step in boundaries(config)]
        shares = [each.ref_refresh_mix for each in steps if each.ref_refresh_steps > 0]
        mixed = any(share < 1 for share in shares)
        self.ref_role = Role("train", trainable=False, refreshed=bool(shares), mixed=mixed)
        adapts_kl = any(each.kl_target is not None for each in steps)
        adapts_entropy = any(each.entropy_target is not None for each in steps)
        self.adaptive_kl = AdaptiveKL(algorithm.kl_coef) if adapts_kl else None
        self.adaptive_entropy = AdaptiveEntropy(algorithm.entropy_coef) if adapts_entropy else None

    @property
    def _now(self) -> AlgorithmConfig:
        return self.settings.now.algorithm

    @property
    def kl_coef(self) -> float:
        """Coefficient of the KL penalty in this step."""
        return self._now.kl_coef if self.adaptive_kl is None else self.adaptive_kl.coef

    @property
    def entropy_coef(self) -> float:
        """Coefficient of the entropy bonus in this step."""
        return self._now.entropy_coef if self.adaptive_entropy is None else self.adaptive_entropy.applied

    @property
    def correction(self) -> Correction:
        """Correction of the gap between sampler and trainer in this step's objective.

        ``auto`` weighs tokens, unless the sampler reads the actor's own module and samples all rollouts of a
        step with it: then no gap exists. With ``bypass`` the ratio of a loss is relative to the sampler already, so
        ``auto`` weighs only a loss without a ratio.
        """
        config = self._now.correction
        level = config.level
        if level == "auto":
            level = "off" if self.one_policy() and not config.bypass else "token"
        if config.bypass and self.loss.ratio:
            level = "off"
        return Correction(**{**config.model_dump(exclude=OWN_KEYS), "level": level})

    def mini_batches(self, batch: Batch, step: int) -> list[Batch]:
        """Split a batch into mini-batches of `mini_batch_prompts` whole groups and add ``weights`` [T].

        Every epoch after the first has a new random order.

        Args:
            batch: B rollouts with ``group_ids`` [B].
            step: step number, which gives the order its seed.
        """
        algorithm, groups = self._now, batch["group_ids"]
        order = torch.unique(groups)
        size = algorithm.mini_batch_prompts or max(len(order), 1)
        generator = torch.Generator().manual_seed(self.settings.config.run.seed * 1_000_003 + step)
        minis = []
        for epoch in range(algorithm.epochs):
            if epoch:
                order = order[torch.randperm(len(order), generator=generator)]
            for chosen in order.split(size):
                rows = torch.isin(groups, chosen).nonzero().flatten()
                chosen_rows = batch if len(rows) == len(batch) else batch.select(rows)
                minis.append(with_weights(chosen_rows, *self.aggregation))
        return minis

    @property
    def aggregation(self) -> tuple[str, int]:
        """The aggregation of this step's loss, and the length that one of them divides by."""
        mode, norm = self._now.loss_aggregation, self._now.loss_length_norm
        norm = norm or self.settings.config.rollout.max_response_tokens
        return self.loss.aggregation if mode == "auto" else mode, norm

    def with_statistics(self, mini: Batch) -> Batch:
        """Add the [T] columns that are statistics over a mini-batch, computed with the policy before its update.

        Args:
            mini: the whole mini-batch, with at least one loss token.
        """
        algorithm = self._now
        if self.plan.measured:
            outputs = tuple(requirements.MEASURED[column] for column in self.plan.measured)
            made = self.groups["actor"].call("infer", mini, outputs=outputs).result()
            mini = mini.with_columns(
                tokens={c: made[o] for c, o in zip(self.plan.measured, outputs, strict=True)}
            )
        columns: dict[str, torch.Tensor] = {}
        if algorithm.top_entropy_quantile < 1:
            entropy, mask = mini["current_entropy"], mini["loss_mask"]
            columns["learned"] = high_entropy(entropy, mask, algorithm.top_entropy_quantile)
        if algorithm.correction.normalize:
            before = mini["current_log_probs" if algorithm.correction.bypass else "old_log_probs"]
            columns["correction_scale"] = normalizing_scale(mini, before, self.correction)
        return mini.with_columns(tokens=columns)

    def loss_call(self) -> LossCall:
        """Return the actor's objective, by name and plain values."""
        algorithm = self._now
        parameters: dict[str, Any] = {
            "loss": algorithm.loss,
            "loss_options": algorithm.loss_options.model_dump() if algorithm.loss_options else {},
            "kl_coef": self.kl_coef if algorithm.kl_in == "loss" else 0.0,
            "kl_estimator": algorithm.kl_estimator,
            "entropy_coef": self.entropy_coef,
            "correction": vars(self.correction),
            "bypass": algorithm.correction.bypass,
        }
        return LossCall("policy", parameters, self.plan.outputs, watched=("entropy",))

    def check(self, metrics: Mapping[str, float]) -> None:
        """Refuse an update if policy and sampler differ too much or too few tokens count.

        Args:
            metrics: of the mini-batch's loss.

        Raises:
            TrainingFailed: the gap is over `rollout.max_log_prob_gap`, the correction masked more than
                `max_masked_share`, or the effective share of its importance weights is below
                `min_effective_sample_share`. The model's weights are unchanged.
        """
        if "mismatch/mean_abs" not in metrics:
            return  # a step without the sampler's log-probs, so nothing is weighed or masked
        gap = fresh_gap(metrics)
        check_gap(gap, self.settings.config.rollout.max_log_prob_gap)
        masked, most = metrics.get("correction/masked_share", 0.0), self._now.correction.max_masked_share
        if masked > most:
            raise TrainingFailed(
                f"The correction masked {masked:.3g} of the loss tokens (algorithm.correction.max_masked_share = "
                f"{most}). The weights were left alone. Mean |log ratio| of sampler and trainer is {gap:.4g}: widen "
                "mask_low and mask_high or reject_ratio, or find out why the two differ."
            )
        share, least = effective_share(metrics), self._now.correction.min_effective_sample_share
        if share is not None and share < least:
            raise TrainingFailed(
                f"The importance weights are worth {share:.3g} of the loss tokens "
                f"(algorithm.correction.min_effective_sample_share = {least}): a few tokens would decide the update. "
                f"The model's weights were left alone. Mean |log ratio| of sampler and trainer is {gap:.4g}: lower "
                "cap, train on newer rollouts, or find out why the two differ."
            )

    def settle(self, metrics: Mapping[str, float], num_rollouts: int) -> dict[str, float]:
        """Move the adaptive coefficients after the updates of a step; return metrics of them and of the correction.

        Args:
            metrics: of the step's updates.
            num_rollouts: B.
        """
        algorithm = self._now
        found: dict[str, float] = {}
        if self.adaptive_kl is not None:
            found["actor/kl_coef"] = self.adaptive_kl.coef
            if algorithm.kl_target is not None and "actor/kl" in metrics:
                self.adaptive_kl.update(
                    metrics["actor/kl"], algorithm.kl_target, algorithm.kl_horizon, num_rollouts
                )
        if self.adaptive_entropy is not None:
            found["actor/entropy_coef"] = self.adaptive_entropy.applied
            if algorithm.entropy_target is not None and "actor/entropy" in metrics:
                self.adaptive_entropy.update(
                    metrics["actor/entropy"], algorithm.entropy_target, algorithm.entropy_delta
                )
        if metrics.get("mismatch/fresh_share"):  # without new tokens there is nothing to compare
            found["mismatch/fresh_mean_abs"] = fresh_gap(metrics)
        if (share := effective_share(metrics)) is not None:
            found["correction/effective_sample_share"] = share
        return found

    def state(self) -> dict[str, Any]:
        """Return the JSON state of the adaptive coefficients."""
        adaptive = {"kl": self.adaptive_kl, "entropy": self.adaptive_entropy}
        return {name: vars(held).copy() for name, held in adaptive.items() if held is not None}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore the result of ``state``; a coefficient that was not adaptive then starts from the run file."""
        if self.adaptive_kl is not None and "kl" in state:
            self.adaptive_kl = AdaptiveKL(**state["kl"])
        if self.adaptive_entropy is not None and "entropy" in state:
            self.adaptive_entropy = AdaptiveEntropy(**state["entropy"])


def fresh_gap(metrics: Mapping[str, float]) -> float:
    """Return the mean |rollout log-prob - train log-prob| over tokens that the newest policy sampled; 0 without any."""
    share = metrics.get("mismatch/fresh_share", 1.0)
    total = metrics.get("mismatch/fresh_abs", metrics["mismatch/mean_abs"])
    return total / share if share > 0 else 0.0


def effective_share(metrics: Mapping[str, float]) -> float | None:
    """Return ``(mean w)^2 / mean w^2`` of the importance weights: 1 if all are equal; None if nothing is weighed."""
    square = metrics.get("correction/weight_square")
    return metrics["correction/weight_mean"] ** 2 / square if square else None


def check_gap(gap: float, bound: float) -> None:
    """Refuse an update if the log-probs of sampler and trainer differ too much.

    Args:
        gap: mean |rollout log-prob - train log-prob| of the mini-batch.
        bound: `rollout.max_log_prob_gap`.

    Raises:
        TrainingFailed: the gap is over the bound. The weights are unchanged.
    """
    if gap > bound:
        raise TrainingFailed(
            f"Rollout and train log-probs differ by {gap:.4g} on average (rollout.max_log_prob_gap = {bound}). "
            "The weights were left alone. The sampler does not have the trainer's weights, or computes another "
            "distribution (temperature, top-p, precision)."
        )


def check_columns(advantage: str, columns: Mapping[str, Any], num_tokens: int) -> None:
    """Check that each column of an advantage estimator is a tensor [T].

    Args:
        advantage: name of the estimator.
        columns: its result, by name.
        num_tokens: T.

    Raises:
        PluginError: a column is not a tensor [T].
    """
    for name, column in columns.items():
        if not isinstance(column, torch.Tensor) or column.shape != (num_tokens,):
            got = list(column.shape) if isinstance(column, torch.Tensor) else type(column).__name__
            raise PluginError(
                f"algorithm.advantage = '{advantage}' must give {name} as [T] = [{num_tokens}], one value a token; "
                f"it gave {got}. batch.to_tokens(values) makes [T] of one value a rollout."
            )


def all_finite(column: torch.Tensor) -> bool:
    """Return whether all values of a column, `[B]` or `[T]`, are finite.

    A finite sum proves it in a tenth of the time of checking each value.
    """
    return bool(column.sum().isfinite()) or bool(column.isfinite().all())


def with_derived(batch: Batch, name: str, column: Any) -> Batch:
    """Return the batch with a column that a plugin computed: one value per token [T] or per sequence [B].

    Raises:
        PluginError: the column is not a tensor [T] or [B], or a value is not finite.
    """
    lengths: dict[tuple[int, ...], str] = {(batch.num_tokens,): "tokens", (len(batch),): "sequences"}
    if not isinstance(column, torch.Tensor) or tuple(column.shape) not in lengths:
        got = list(column.shape) if isinstance(column, torch.Tensor) else type(column).__name__
        raise PluginError(
            f"The column '{name}' must be [T] = [{batch.num_tokens}] or [B] = [{len(batch)}]; its function gave {got}."
        )
    if not bool(column.isfinite().all()):
        raise PluginError(f"The column '{name}' has a value that is not finite. The weights were left alone.")
    return batch.with_columns(**{lengths[tuple(column.shape)]: {name: column}})


class CriticUpdate:
    """The update of the critic from one batch of rollouts; it does nothing if the algorithm needs no critic.

    Args:
        needed: whether the algorithm needs a critic.
        table: ``[critic]``, if the run file has it.
        learn: does one optimizer step, as ``TrainingRun.learn``.
    """

    def __init__(
        self, needed: bool, table: CriticConfig | None, learn: Callable[..., dict[str, float]]
    ) -> None:
        self.needed, self.learn = needed, learn
        table = table if needed else None
        self.warmup_steps = table.warmup_steps if table else 0
        self.clip_ratio = table.clip_ratio if table else 0.0

    def roles(self) -> dict[str, Role]:
        """Return the role ``critic`` if the algorithm needs it, else {}."""
        return {"critic": Role("train")} if self.needed else {}

    def check_warmup(self, steps: int) -> None:
        """Refuse a warm-up that lasts for all ``steps`` of the run.

        Raises:
            ConfigError: names the key.
        """
        if self.warmup_steps >= steps:
            raise ConfigError(
                f"critic.warmup_steps: got {self.warmup_steps}, expected less than the {steps} steps of the run: the policy "
                "would never learn."
            )

    def alone(self, step: int) -> bool:
        """Return whether only the critic learns in this step."""
        return step <= self.warmup_steps

    def update(self, batch: Batch, minis: Sequence[Batch]) -> dict[str, float]:
        """Do one optimizer step of the critic per mini-batch, before those of the policy.

        Args:
            batch: of the step, with ``values`` [T] and ``returns`` [T].
            minis: its mini-batches, with ``token_share`` [T].

        Returns:
            ``critic/...`` metrics.
        """
        if not self.needed:
            return {}
        return over_updates(map(self._update_on, minis)) | {
            "critic/explained_variance": explained_variance(batch)
        }

    def _update_on(self, mini: Batch) -> dict[str, float]:
        if not bool(mini["loss_mask"].any()):
            return {"critic/empty_updates": Sum(1.0)}
        mini = mini.with_columns(tokens={"weights": mini["token_share"]})
        call = LossCall("value", {"value_clip": self.clip_ratio or None}, outputs=("values",))
        return self.learn(mini, call, role="critic")


def explained_variance(batch: Batch) -> float:
    """Return ``1 - Var(G - V) / Var(G)`` over the loss tokens.

    The value is 1 if the critic knows the returns, 0 if it only knows their mean.

    Args:
        batch: ``returns`` [T] (G), ``values`` [T] (V, before the update), ``loss_mask`` [T].

    Returns:
        A value of at most 1; 0 if all returns are equal or fewer than two exist.
    """
    mask = batch["loss_mask"]
    returns, values = batch["returns"][mask].double(), batch["values"][mask].double()
    spread = float(returns.var(correction=0)) if len(returns) > 1 else 0.0
    return 1.0 - float((returns - values).var(correction=0)) / spread if spread > 0 else 0.0
