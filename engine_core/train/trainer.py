"""THE LOOP: prompts -> rollouts -> rewards -> stages -> advantages -> update -> weight sync.

The trainer is one plain program that holds rollouts as data and calls worker groups, each of which may run
on other machines and be sharded differently. ``train.run`` has what every trainer shares (run folder, checkpoints,
schedule, progress), ``train.sampled_run`` what every sampling trainer shares. Left out on purpose: asynchrony,
which is in a separate file.

Shapes: P prompts, G rollouts per prompt, B = P * G rollouts, T tokens of all sequences concatenated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine_core.algorithms.advantages import advantages_of
from engine_core.algorithms.regularizers import kl_estimate
from engine_core.config import requirements
from engine_core.contracts.runtime import Role
from engine_core.errors import TrainingFailed
from engine_core.metrics import Sum, over_updates
from engine_core.timeline import counting
from engine_core.train.capabilities import check_other_policy, replays_support
from engine_core.train.models import check_teacher
from engine_core.train.sampled_run import SampledRun
from engine_core.train.update import CriticUpdate, PolicyUpdate, all_finite, check_columns, with_derived

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from engine_core.types import Batch


class Trainer(SampledRun):
    """A trainer for reinforcement learning from verifiable rewards: GRPO, PPO and their family.

    Args:
        config: from ``load_config``.
        model: a live module instead of ``[model] path`` (local runtime).
        tokenizer: a live tokenizer.
        rewards: functions, called in this process with weight 1, in addition to ``[[reward]]``.
        data: rows (dicts) instead of ``[data] train``.

    Example: ``Trainer(load_config("run.toml", {"actor.optim.lr": 1e-6})).train()``.
    """

    streams = True

    def prepare(self) -> None:
        """Resolve the algorithm and what it needs; refuse what cannot work."""
        config, plugins = self.config, self.plugins
        self.policy = PolicyUpdate(self.settings, plugins, self.groups, self._is_one_policy)
        plan = self.policy.plan
        if plan.needs("teacher"):
            check_teacher(config, plugins, self.tokenizer)
        self.critic = CriticUpdate(plan.needs("critic"), config.critic, self.learn)
        if self.training:
            self.critic.check_warmup(self.total_steps)
        self.advantage = plugins.function("advantages", config.algorithm.advantage)
        self.samples_greedy = plan.greedy
        if self.samples:
            check_other_policy(config)
        roles = self.roles(training=True).items()
        inferring = [name for name, role in roles if role.kind == "train" and name != "critic"]
        self.replays_support = replays_support(config, plugins, inferring, self.samples)
        super().prepare()
        if config.rollout.stream_update or config.rollout.stream_deterministic:
            self.stream_update = plugins.require("parts", "stream_update")(self, self._cleanup)

    def roles(self, training: bool) -> dict[str, Role]:
        """Return the roles that the algorithm needs: actor and rollout, perhaps ref, teacher and critic."""
        if not training:
            return {"actor": Role("train", trainable=False), "rollout": Role("rollout")}
        ref = {"ref": self.policy.ref_role} if self.policy.plan.needs("ref") else {}
        actor = Role("train", idle_steps=self.optimizer_steps(self.critic.warmup_steps))
        teacher = {"teacher": Role("train", trainable=False)} if self.policy.plan.needs("teacher") else {}
        return {"actor": actor, **ref, **teacher, **self.critic.roles(), "rollout": Role("rollout")}

    @property
    def optimizer_steps_per_step(self) -> int:
        """Maximum number of policy updates in one step: one per mini-batch and epoch."""
        return self.policy.plan.updates_per_step

    def optimizer_steps(self, steps: int) -> int:
        """Return the policy updates of the first ``steps`` steps, whose number ``[schedule]`` may change."""
        return requirements.optimizer_steps(self.config, steps)

    def _is_one_policy(self) -> bool:
        """Return whether the sampler reads the actor's module and samples all rollouts of a step with it."""
        return self.runtime.shared and not self.off_policy

    def step(self, step: int) -> dict[str, float]:
        """Do one step: take P prompts, update the policy, send the new weights to the samplers."""
        rollouts, metrics = self.rollouts(step)  # B, scored, after the stages of the TOML: filters, caches
        if self.stream_update is not None:
            with self.phase("train"):
                metrics |= self.stream_update.finish(rollouts)
        else:
            batch = self.batch(rollouts)  # rewards [B]
            with self.phase("log_probs"):
                batch, noted = self.annotate(batch)  # log-probs, values: only what the algorithm needs
                batch = self.with_advantages(batch)  # [T]
            with self.phase("train"):
                metrics |= noted | self.update(batch, step)
        with self.phase("sync"):
            metrics |= self.push_weights(updated=not self.critic.alone(step))  # worker to worker
            self.refresh_reference(step)
        return metrics

    def annotate(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """Add the columns that the algorithm needs from models, and the KL penalty if the reward includes it.

        Args:
            batch: the step's rollouts, with ``rewards`` [B].

        Returns:
            The batch with more columns, most of them [T]; metrics of the KL penalty.
        """
        algorithm = self.config_now.algorithm
        columns: dict[str, torch.Tensor] = {}
        for role, outputs in self.policy.plan.inferred(batch["group_ids"], algorithm).items():
            asked = tuple(dict.fromkeys(outputs.values()))
            made = self.groups[role].call("infer", batch, outputs=asked).result()
            columns |= {column: made[output] for column, output in outputs.items()}
        if algorithm.correction.bypass:
            columns["old_log_probs"] = batch["rollout_log_probs"]
        batch = batch.with_columns(tokens=columns)
        for name in self.policy.plan.derived:
            batch = with_derived(batch, name, self.plugins.function("columns", name)(batch))
        if algorithm.kl_in == "loss" or not algorithm.kl_coef:
            return batch, {}
        per_token = kl_estimate(batch["old_log_probs"], batch["ref_log_probs"], algorithm.kl_estimator)
        penalty = self.policy.kl_coef * per_token * batch["loss_mask"]  # [T]
        kl = batch.sum_by_sequence(per_token * batch["loss_mask"])  # [B]
        shaped = {"rewards": batch["rewards"] - self.policy.kl_coef * kl}
        noted = {"reward/kl_penalty": float(kl.mean())}
        return batch.with_columns(tokens={"kl_penalty": penalty}, sequences=shaped), noted

    def with_advantages(self, batch: Batch) -> Batch:
        """Add ``advantages`` [T] (and ``returns`` [T], if the estimator gives them).

        Raises:
            PluginError: the estimator did not return one value per token.
            TrainingFailed: a value is not finite; no weight has changed.
        """
        options = self.config_now.algorithm.advantage_options
        made = advantages_of(self.advantage, batch, options.model_dump() if options else {})
        columns = dict(made) if isinstance(made, Mapping) else {"advantages": made}
        check_columns(self.config.algorithm.advantage, columns, batch.num_tokens)
        if not all(map(all_finite, columns.values())):
            given = {**batch.sequences, **batch.tokens}
            bad = " and ".join(f"'{name}'" for name, column in given.items() if not all_finite(column))
            cause = "Its inputs are finite."
            if bad:
                cause = f"Its input {bad} is not finite either: look there first."
            raise TrainingFailed(
                f"algorithm.advantage = '{self.config.algorithm.advantage}' gave a value that is not finite. "
                f"No weight has changed. {cause}"
            )
        batch = batch.with_columns(tokens=columns)
        self.emit("advantages_computed", {"advantages": batch["advantages"][batch["loss_mask"]]})
        return batch

    def update(self, batch: Batch, step: int) -> dict[str, float]:
        """Do one optimizer step per mini-batch: of the critic, if the run has one, then of the policy."""
        minis = self.policy.mini_batches(batch, step)
        learned = self.critic.update(batch, minis)
        if self.critic.alone(step):
            return learned
        updates = []
        with counting(len(minis)) as add:
            for mini in minis:
                updates.append(self.update_on(mini))
                add(1)
        metrics = over_updates(updates)
        return learned | metrics | self.policy.settle(metrics, len(batch))

    def update_on(self, mini: Batch) -> dict[str, float]:
        """Update the policy on a mini-batch: forward, backward, check, optimizer step."""
        if not bool(mini["loss_mask"].any()):
            return {"actor/empty_updates": Sum(1.0)}
        mini = self.policy.with_statistics(mini)
        return self.learn(mini, self.policy.loss_call(), check=self.policy.check)

    def refresh_reference(self, step: int) -> None:
        """Mix the actor's weights into the reference (share `ref_refresh_mix`) every `ref_refresh_steps` steps."""
        algorithm = self.config_now.algorithm
        if algorithm.ref_refresh_steps and step % algorithm.ref_refresh_steps == 0 and "ref" in self.groups:
            self.runtime.mix_weights("actor", "ref", algorithm.ref_refresh_mix)

    def state(self) -> dict[str, Any]:
        """Return the state of a sampled run and of the policy's adaptive coefficients."""
        return super().state() | {"policy": self.policy.state()}

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        """Restore a sampled run and the policy's adaptive coefficients."""
        super().load_state(state, folder)
        self.policy.load_state(state["policy"])
