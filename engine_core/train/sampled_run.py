"""Base class of every trainer that samples: a sampler next to the actor, rewards, stages, evaluation by sampling.

A custom data flow is a subclass with a ``step`` like this one::

    def step(self, step):
        rollouts, metrics = self.rollouts(step)  # sampled, scored, after the stages
        ...  # build the batch to learn from
        return metrics | self.learn(batch, LossCall("nll")) | self.sync()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_core.contracts.parts import CARRIED
from engine_core.contracts.runtime import Role
from engine_core.data import PromptSource
from engine_core.rewards.preflight import ROWS
from engine_core.train.capabilities import check_adapter, check_partial
from engine_core.train.evaluation import Evaluation
from engine_core.train.models import held_tokens
from engine_core.train.rollouts import RolloutSource
from engine_core.train.run import TrainingRun
from engine_core.train.source_rows import environment_tools, rows_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from engine_core.types import Prompt, Rollout


class SampledRun(TrainingRun):
    """A run that samples the rollouts it learns from; a subclass defines in ``step`` how it learns."""

    def prepare(self) -> None:
        """Check the sampler's options, build the rollout source, and read the held-out sets."""
        check_adapter(self)
        check_partial(self)
        self.sampling = self.make_sampling()
        self._cleanup.callback(self.sampling.close)
        self.evaluation = Evaluation(self, self.sampling)

    def make_source(self) -> Any:
        """Build the source of prompts; ``[data] over_long`` applies to prompts that are too long to continue."""
        data, rows, held = self.config.data, rows_of(self), held_tokens(self)
        seed, tools = self.config.run.seed, environment_tools(self)
        return PromptSource(data, self.tokenizer, seed, rows=rows, held=held, tools=tools)

    def make_sampling(self) -> RolloutSource:
        """Build the source of rollouts."""
        return RolloutSource(self)

    def reward_columns(self) -> set[str]:
        """Return the columns of the rows that are scored."""
        columns: set[str] = self.source.columns()
        return columns

    def reward_rows(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Return place and columns of some rows that are scored, for the check of rewards before the run begins."""
        rows: Iterable[tuple[str, Mapping[str, Any]]] = self.source.spread(ROWS)
        return rows

    def roles(self, training: bool) -> dict[str, Role]:
        """Return the roles ``actor`` and ``rollout``."""
        return {"actor": Role("train", trainable=training), "rollout": Role("rollout")}

    def start(self) -> None:
        """Send the actor's weights to the sampler."""
        self.sampling.sync(updated=False)  # a broken transport ends the run here, not after an hour

    @property
    def samples(self) -> bool:
        """True: each step samples its rollouts."""
        return True

    @property
    def off_policy(self) -> bool:
        """Whether the run learns from tokens that older policies sampled."""
        early_stop = self.sampling.early_stop
        return self.sampling.stages.off_policy or (early_stop is not None and early_stop.off_policy)

    @property
    def samples_greedy(self) -> bool:
        """Whether each prompt gets an additional greedy response, for ``Rollout.greedy_reward``."""
        return False

    @property
    def replays_support(self) -> bool:
        """Whether rollouts record the support that top-p and top-k left, and log-probs are computed over it."""
        return False

    def rollouts(self, step: int) -> tuple[list[Rollout], dict[str, float]]:
        """Sample and score the rollouts of a step, apply the stages of the run file, and record the rollouts.

        Returns:
            B rollouts, groups together; the metrics of sampling, rewards and stages.
        """
        return self.sampling.rollouts(step)

    def sync(self, updated: bool = True) -> dict[str, float]:
        """Send the actor's weights to the sampler; return metrics of it.

        Args:
            updated: whether the weights have changed since the last call.
        """
        with self.phase("sync"):
            return self.sampling.sync(updated)

    def generate(self, prompts: list[Prompt]) -> list[Rollout]:
        """Sample and score `group_size` responses a prompt with the current weights, outside of training."""
        self.setup()
        with self.runtime.phase("generate"):
            rollouts = self.sampling.sample(prompts, step=0)
        self.sampling.score(rollouts, step=0, training=False)
        return rollouts

    def evaluate(self, out: Path | None = None) -> dict[str, float]:
        """Sample the held-out prompts as ``[eval]`` says and score them; return ``eval/...`` metrics.

        Args:
            out: folder for the rollouts, one file a set.
        """
        self.setup()
        return self.evaluation.measure(out)

    def measured(self, rollouts: list[Rollout]) -> dict[str, float]:
        """Return a trainer's own metrics of the rollouts of a held-out set, in addition to their rewards."""
        return {}

    def state(self) -> dict[str, Any]:
        """Return the state of stages, and the version of the weights."""
        return {
            "stages": self.sampling.stages.state(),
            "version": self.sampling.version,
        }

    def files(self) -> Mapping[str, Callable[[Path], object]]:
        """Return the writers of rollouts that stages and early stopping keep, by file."""
        early_stop = self.sampling.early_stop
        return {**self.sampling.stages.files(), **(early_stop.files() if early_stop else {})}

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        """Restore the version, in training also kept rollouts; then send the weights to the sampler."""
        self.sampling.version = state["version"]
        if self.training:
            self.sampling.stages.load(state.get("stages", {}), folder)
            if self.sampling.early_stop is None and (folder / CARRIED).is_file():  # the run used it until now
                self.sampling.early_stop = self.sampling.make_early_stop()
            if self.sampling.early_stop:
                self.sampling.early_stop.load(folder)
        self.sampling.sync(updated=False)  # for a sampler with its own copy of the weights
