"""What every trainer that samples shares: a sampler beside the actor, rewards, stages, evaluation by sampling.

A data flow of one's own is a subclass with ``step``, in words like these::

    def step(self, step):
        rollouts, metrics = self.rollouts(step)  # sampled, scored, through the stages
        ...  # a batch of what is to be learned
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
    """A run that samples what it learns from; a subclass says in ``step`` what is learned."""

    def prepare(self) -> None:
        check_adapter(self)
        check_partial(self)
        self.sampling = self.make_sampling()
        self._cleanup.callback(self.sampling.close)
        self.evaluation = Evaluation(self, self.sampling)

    def make_source(self) -> Any:
        """Prompts that can be continued; others go the way of ``[data] over_long``."""
        data, rows, held = self.config.data, rows_of(self), held_tokens(self)
        seed, tools = self.config.run.seed, environment_tools(self)
        return PromptSource(data, self.tokenizer, seed, rows=rows, held=held, tools=tools)

    def make_sampling(self) -> RolloutSource:
        """Where rollouts come from."""
        return RolloutSource(self)

    def reward_columns(self) -> set[str]:
        """Columns of the rows that are scored."""
        columns: set[str] = self.source.columns()
        return columns

    def reward_rows(self) -> Iterable[tuple[str, Mapping[str, Any]]]:
        """Place and columns of rows that are scored, for rewards to look at before the run begins."""
        rows: Iterable[tuple[str, Mapping[str, Any]]] = self.source.spread(ROWS)
        return rows

    def roles(self, training: bool) -> dict[str, Role]:
        return {"actor": Role("train", trainable=training), "rollout": Role("rollout")}

    def start(self) -> None:
        self.sampling.sync(updated=False)  # a broken transport ends the run here, not after an hour

    @property
    def samples(self) -> bool:
        return True

    @property
    def off_policy(self) -> bool:
        """Whether tokens of older policies are learned from."""
        early_stop = self.sampling.early_stop
        return self.sampling.stages.off_policy or (early_stop is not None and early_stop.off_policy)

    @property
    def samples_greedy(self) -> bool:
        """Whether each prompt gets one more response, the most likely one, for ``Rollout.greedy_reward``."""
        return False

    @property
    def replays_support(self) -> bool:
        """Whether rollouts tell what top-p and top-k left, and log-probs are computed over that."""
        return False

    def rollouts(self, step: int) -> tuple[list[Rollout], dict[str, float]]:
        """The rollouts of a step: sampled, scored and through the stages of the run file; written down.

        Returns:
            B rollouts, groups together; the metrics of sampling, rewards and stages.
        """
        return self.sampling.rollouts(step)

    def sync(self, updated: bool = True) -> dict[str, float]:
        """Bring the sampler to the actor's weights; metrics of it.

        Args:
            updated: they have changed since the last time.
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
        """Sample the held-out prompts as ``[eval]`` says and score them; ``eval/...`` metrics.

        Args:
            out: folder for the rollouts, one file a set.
        """
        self.setup()
        return self.evaluation.measure(out)

    def measured(self, rollouts: list[Rollout]) -> dict[str, float]:
        """What a trainer tells of the rollouts of a held-out set, beside their rewards."""
        return {}

    def state(self) -> dict[str, Any]:
        return {
            "rewards": self.sampling.rewards.state(),
            "stages": self.sampling.stages.state(),
            "version": self.sampling.version,
        }

    def files(self) -> Mapping[str, Callable[[Path], object]]:
        early_stop = self.sampling.early_stop
        return {**self.sampling.stages.files(), **(early_stop.files() if early_stop else {})}

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        self.sampling.rewards.load_state(state["rewards"])
        self.sampling.version = state["version"]
        if self.training:
            self.sampling.stages.load(state.get("stages", {}), folder)
            if self.sampling.early_stop is None and (folder / CARRIED).is_file():  # it was used until now
                self.sampling.early_stop = self.sampling.make_early_stop()
            if self.sampling.early_stop:
                self.sampling.early_stop.load(folder)
        self.sampling.sync(updated=False)  # also a sampler with weights of its own now has these
