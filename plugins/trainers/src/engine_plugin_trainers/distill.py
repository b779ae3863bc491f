"""Trainer of on-policy distillation: the student samples, and the teacher gives its distribution at each token.

::

    prompts -> rollouts of the student -> the teacher's likeliest tokens at each position -> divergence -> update

The teacher's output is large (tokens times K), so a step processes its batch in parts. For each part the teacher is
queried, the gradient is accumulated, and the values are dropped. One optimizer step follows the last part. Token
weights are normalized over the whole step, so the result does not depend on the split.

Left out: rewards in the loss. With ``[[reward]]`` rewards are only measured. For task rewards together with a teacher
use the trainer ``rl`` with the teacher as ``[ref]``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from engine_core.algorithms.objectives import resolve_loss, with_weights
from engine_core.config.schedule import boundaries, config_at
from engine_core.contracts.runtime import Role
from engine_core.data.rows import open_rows
from engine_core.errors import ConfigError
from engine_core.metrics import Sum, declared, merge
from engine_core.train.models import check_teacher
from engine_core.train.rollouts import sampling_seed
from engine_core.train.sampled_run import SampledRun
from engine_core.train.update import check_gap, fresh_gap
from engine_core.types import Batch, LossCall
from engine_plugin_trainers.models import common_vocabulary, table_length
from engine_plugin_trainers.options import SFTOptions
from engine_plugin_trainers.sft import example_batch, example_source

if TYPE_CHECKING:
    from pathlib import Path

    from engine_core.data.source import Source
    from engine_core.types import Rollout
    from engine_plugin_trainers.data.examples import Example
    from engine_plugin_trainers.options import DistillOptions

DEFAULT_TOP_K = 128
OF_TEACHER = {
    "top_ids": "candidate_ids",
    "top_log_probs": "candidate_log_probs",
    "top_log_rest": "candidate_log_rest",
}
"""Output of the teacher -> column that the student's objective reads."""

PLACE = ("seed", "shuffle", "epoch", "position")
"""Part of a source's state: the order of the rows, and how far they are used."""

COUNTS = ("bad", "counts")
"""Part of a source's state: the unusable rows, and the numbers of rows for metrics."""


class DistillTrainer(SampledRun):
    """A trainer that learns a teacher's distribution at the tokens that the student samples.

    A step samples ``data.prompts_per_step`` times ``rollout.group_size`` responses and makes one optimizer step. The
    loss is the mean divergence over their tokens. With ``distill.data_share`` some steps use the responses of the
    data instead.
    """

    def prepare(self) -> None:
        """Check that teacher and student fit, choose K, and open the data if steps use it."""
        config, plugins = self.config, self.plugins
        check_teacher(config, plugins, self.tokenizer)
        self.top_k = self._candidates(common_vocabulary(config, plugins, self.live.get("model")))
        self.examples = self._examples() if self._uses_data() else None
        if self.examples is not None:
            self.late_metrics = ("",)  # all: a step from the data measures less than one of samples
        super().prepare()

    def roles(self, training: bool) -> dict[str, Role]:
        """Return the actor, the frozen teacher and the sampler."""
        sampler = super().roles(training)
        return {"actor": sampler.pop("actor"), "teacher": Role("train", trainable=False), **sampler}

    def start(self) -> None:
        """Query a frozen-only teacher once."""
        super().start()
        backend: Any = self.plugins.spec("train_engines", self.config.role("teacher").backend)
        # it may return fewer than K tokens: fail here, not after the first rollouts
        if backend.frozen_only:
            two = Batch(torch.zeros(2, dtype=torch.int64), torch.tensor([2]), temperature=self.temperature)
            self.with_teacher(two.with_columns({"loss_mask": torch.tensor([False, True])}))

    @property
    def options(self) -> DistillOptions:
        """Options of ``[distill]`` at this step."""
        options: DistillOptions = self.config_now.options
        return options

    @property
    def temperature(self) -> float:
        """Softmax temperature of both distributions."""
        return self.options.temperature or self.config_now.rollout.temperature

    def step(self, step: int) -> dict[str, float]:
        """Take sequences of the student or of the data, query the teacher, and make one update; return metrics."""
        if self.from_data(step):
            batch = example_batch(self.take_examples())
            metrics = {"tokens/total": float(batch.num_tokens)}
        else:
            batch, metrics = self.sampled(step)
        metrics["distill/from_data"] = float(self.from_data(step))
        batch = self.compared(batch)
        if not bool(batch["loss_mask"].any()):
            return metrics | {"actor/empty_updates": Sum(1.0)}
        with self.phase("train"):
            metrics |= self.learn(
                map(self.with_teacher, self.parts(batch)), self.loss_call(), check=self.check
            )
        if metrics.get("mismatch/fresh_share"):  # without new tokens there is nothing to compare
            metrics["mismatch/fresh_mean_abs"] = fresh_gap(metrics)
        return metrics | self.sync()

    def from_data(self, step: int) -> bool:
        """Return whether a step uses the responses of the data; seeded by step, so a resumed run draws the same."""
        drawn = sampling_seed(self.config.run.seed, step, -1, -1) / 2**63
        return drawn < self.options.data_share

    def take_examples(self) -> list[Example]:
        """Return the examples of a step; in an epoch, a row gives either a prompt or an example."""
        assert self.examples is not None
        self._pass_on(self.source, self.examples)
        examples = self.examples.take(self.config_now.data.prompts_per_step)
        self._pass_on(self.examples, self.source)
        return examples

    def sampled(self, step: int) -> tuple[Batch, dict[str, float]]:
        """Return the batch of a step's rollouts after rewards and stages, with token weights, and metrics."""
        rollouts, metrics = self.rollouts(step)
        return with_weights(self.batch(rollouts), "token-mean"), self._without_rewards(metrics)

    def compared(self, batch: Batch) -> Batch:
        """Return the batch at the divergence's temperature; without ``rollout_log_probs`` if the sampler's differs."""
        if batch.temperature != self.temperature:
            kept = {name: column for name, column in batch.tokens.items() if name != "rollout_log_probs"}
            return dataclasses.replace(batch, tokens=kept, temperature=self.temperature)
        return batch

    def check(self, metrics: Mapping[str, float]) -> None:
        """Refuse responses of the newest policy whose log-probs differ too much from the student's."""
        if "mismatch/mean_abs" in metrics:
            check_gap(fresh_gap(metrics), self.config.rollout.max_log_prob_gap)

    def parts(self, batch: Batch) -> Iterator[Batch]:
        """Yield whole sequences in order, in parts of at most ``distill.max_values`` tokens times K."""
        most = self.options.max_values // self.top_k
        chosen: list[int] = []
        tokens = 0
        for index, length in enumerate(batch.lengths.tolist()):
            if chosen and tokens + length > most:
                yield batch.select(chosen)
                chosen, tokens = [], 0
            chosen.append(index)
            tokens += length
        yield batch.select(chosen)

    def with_teacher(self, part: Batch) -> Batch:
        """Add the teacher's K likeliest tokens at each position, their log-probs, and that of all others together."""
        asked = dataclasses.replace(part, top_k=self.top_k)
        made = self.groups["teacher"].call("infer", asked, outputs=tuple(OF_TEACHER)).result()
        return part.with_columns(tokens={column: made[output] for output, column in OF_TEACHER.items()})

    def loss_call(self) -> LossCall:
        """Return the name of the objective and its parameters."""
        parameters = {"divergence": self.options.divergence, "jsd_beta": self.options.jsd_beta}
        return LossCall(
            "distill", parameters, outputs=("log_probs_at", "log_rest"), watched=("log_probs", "entropy")
        )

    def evaluate(self, out: Path | None = None) -> dict[str, float]:
        """Sample the held-out prompts; return the divergence from the teacher, and rewards if any are configured."""
        return self._without_rewards(super().evaluate(out))

    def measured(self, rollouts: list[Rollout]) -> dict[str, float]:
        """Return the metrics of the divergence on these rollouts."""
        batch = Batch.from_rollouts(rollouts, self.temperature)
        batch.tokens.pop("rollout_log_probs")  # these are at the temperature of [eval]
        batch, call = with_weights(batch, "token-mean"), self.loss_call()
        objective, found = resolve_loss(call, self.plugins), dict[str, float]()
        with self.runtime.phase("train"):
            for part in map(self.with_teacher, self.parts(batch)):
                names = (*call.outputs, *call.watched)
                outputs = self.groups["actor"].call("infer", part, outputs=names).result()
                merge(found, {name: float(value) for name, value in objective(outputs, part)[1].items()})
        return {name.removeprefix("actor/"): value for name, value in declared(found).items()}

    def state(self) -> dict[str, Any]:
        """Return the state of the run and of the data's examples."""
        examples = {"examples": self.examples.state()} if self.examples is not None else {}
        return super().state() | examples

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        """Restore the state of the run and of the data's examples."""
        super().load_state(state, folder)
        if self.training and self.examples is not None and "examples" in state:
            self.examples.load_state(state["examples"])
            prompts, examples = self.source.state(), self.examples.state()
            later = (examples["epoch"], examples["position"]) > (prompts["epoch"], prompts["position"])
            if later and not self.config.data.curriculum:
                self.source.load_state(prompts | {key: examples[key] for key in PLACE})

    def _candidates(self, vocabulary: int) -> int:
        """Return K: `distill.top_k`, 128 by default, and at most the size of the vocabulary.

        Raises:
            ConfigError: `distill.top_k` is larger than the vocabulary.
        """
        chosen = self.config.options.top_k
        if chosen is None:
            return min(DEFAULT_TOP_K, vocabulary)
        if chosen > vocabulary:
            raise ConfigError(
                f"distill.top_k: got {chosen}, expected at most {vocabulary}, the number of tokens of both models "
                "(vocab_size); 0 takes them all."
            )
        return chosen or vocabulary

    def _uses_data(self) -> bool:
        """Return whether any step may use the responses of the data."""
        steps = [config_at(self.config, step) for step in boundaries(self.config)]
        return any(config.options.data_share > 0 for config in steps)

    def _examples(self) -> Source[Example]:
        """Open the data's examples; a curriculum chooses prompts alone."""
        data, seed = self.config.data, self.config.run.seed
        limits = SFTOptions(max_tokens=self.config.options.max_tokens)
        rows, held = open_rows(data, "train", self.given.train()), table_length(self.text_config)
        source = example_source(rows, data, self.tokenizer, limits, seed, held=held, table="distill")
        self._cleanup.callback(source.close)
        return source

    def _pass_on(self, ahead: Source[Any], behind: Source[Any]) -> None:
        """Let a source of the training rows continue after the rows that the other one has used, with its counts.

        A curriculum orders prompts alone, so each source then has its own position.
        """
        shared = COUNTS if self.config.data.curriculum else PLACE + COUNTS
        now, passed = behind.state(), ahead.state()
        moved = now | {key: passed[key] for key in shared}
        if moved != now:  # else rows that workers have prepared would be discarded
            behind.load_state(moved)

    def _without_rewards(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics; without those of rewards if no reward is configured."""
        if self.rewards.scorers:
            return dict(metrics)
        empty = ("mean", "std", "unrewarded", "failures", "timeouts", "zero_variance_groups")
        unused = {f"reward/{name}" for name in empty}
        of_sets = ("reward_mean", "accuracy", "unscored")  # and the ends of their intervals
        return {
            name: value
            for name, value in metrics.items()
            if name not in unused
            and not (name.startswith("eval/") and name.rpartition("/")[2].startswith(of_sets))
        }
