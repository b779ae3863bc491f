"""Parts of a run that the core calls by name and that a plugin brings (hook ``engine_parts``).

=====================  =======================  ==================================================
name                   protocol                 needed by
=====================  =======================  ==================================================
``reward_workers``     ``RewardWorkers``        ``[[reward]]`` with ``workers`` above 0
``reward_models``      ``RewardModels``         ``[reward.model]``, ``[reward.judge]``, ``[reward.verdict]``
``episodes``           ``Episodes`` (a class)   ``[environment]``
``row_workers``        ``RowWorkers`` (a class) ``data.num_workers`` above 0
``early_stop``         ``EarlyStop`` (a class)  ``rollout.over_sampling`` above 1
``advice``             a function             the log after ten steps, where it is installed
``faults``             a class                ``ENGINE_FAULT``, in tests
``sampler_process``    ``SamplerProcess``       ``[rollout.process]``
``launcher``           ``Launcher``             a command that ``torchrun`` starts on every rank
=====================  =======================  ==================================================
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch import Tensor

    from engine_core.config import EngineConfig, ModelConfig, RolloutConfig
    from engine_core.contracts.engines import RolloutEngine, WorkerContext
    from engine_core.contracts.runtime import Role, WorkerGroup
    from engine_core.plugins.plugin_set import Plugin, PluginSet
    from engine_core.rewards.models import ModelReward, OnFailure
    from engine_core.rewards.signatures import Outcome, Signature
    from engine_core.specs import RolloutBackend
    from engine_core.types import Prompt, Request, Rollout

CARRIED = "carried.parquet"
"""File of a checkpoint with the groups that ``early_stop`` carries into later steps."""


class RewardPool(Protocol):
    """The worker processes of one reward.

    Attributes:
        name: of the reward.
        signature: of its function; None until the first worker has started.
        outcomes: of the samples of the present step, by position; None: not done yet.
        restarts: workers that were replaced so far.
    """

    name: str
    signature: Signature | None
    outcomes: list[Outcome | None]
    restarts: int

    def begin(self, columns: Mapping[str, Sequence[Any]], count: int) -> None:
        """Take ``count`` samples; ``RewardWorkers.drive`` does them."""

    def expect(self, count: int) -> None:
        """Expect ``count`` samples, which come in parts."""

    def close(self) -> None:
        """End the workers."""


class EarlyScores(Protocol):
    """Scoring that began while others were still being sampled.

    Attributes:
        rollouts: in the order of the requests; None: not sampled yet.
        pools: the workers that score them.
        on_failure: called with each failed sample.
        busy_seconds: in which samples were being scored.
    """

    rollouts: list[Any]
    pools: Sequence[RewardPool]
    on_failure: OnFailure
    busy_seconds: float

    def expect(self, requests: Sequence[Request]) -> None:
        """Prepare for the rollouts of these requests."""

    def take(self, rollouts: Sequence[Rollout]) -> None:
        """Score complete groups of what has been sampled so far."""

    def seal(self) -> None:
        """Everything has been sampled."""

    def cancel(self) -> None:
        """Give up what was begun."""


class RewardWorkers(Protocol):
    """Rewards in processes that are killed and replaced when a sample takes too long."""

    def pool(self, name: str, order: Mapping[str, Any], size: int) -> RewardPool:
        """Return the workers of one reward; none is started yet.

        Args:
            name: of the reward.
            order: the first message to each worker: ``reward``, ``options``, ``modules``, ``root``, ``allow_code``, ``path``,
                ``timeout`` (seconds), ``max_memory_gb``.
            size: number of workers.
        """

    def start(self, pools: Sequence[RewardPool]) -> None:
        """Start the workers that do not run yet.

        Raises:
            EngineError: a reward does not load. No process is left.
        """

    def drive(self, pools: Sequence[RewardPool], on_failure: OnFailure) -> None:
        """Keep the workers of all pools busy until each sample has an outcome.

        Args:
            pools: with samples that were begun.
            on_failure: called with each failed sample; what it raises ends the work.
        """

    def early(
        self,
        pools: Sequence[RewardPool],
        on_failure: OnFailure,
        rollouts: list[Any],
        decode: Callable[..., None],
    ) -> EarlyScores:
        """Return scoring of complete groups while others are sampled."""


class RewardModels(Protocol):
    """Rewards that a model of the run gives: reward models, judges, verdicts."""

    def roles(self, config: EngineConfig) -> dict[str, Role]:
        """Return the models of the rewards as roles of the run, ``reward.NAME``."""

    def rewards(
        self,
        config: EngineConfig,
        plugins: Any,
        group_of: Callable[[str], WorkerGroup],
        tokenizer: Any = None,
        columns: Collection[str] = (),
    ) -> dict[str, ModelReward]:
        """Return what asks each reward's model, by reward; refuse here everything that can be refused.

        Args:
            config: of the run.
            plugins: of the run.
            group_of: returns the workers of a role, which need exist only when a value is wanted.
            tokenizer: the actor's; None: there are no sampled tokens, only texts.
            columns: of the data.
        """


class Episodes(Protocol):
    """The environment of a run: samples responses of several turns.

    Attributes:
        reward_weights: weights of the rewards that episodes set.
    """

    reward_weights: Mapping[str, float]

    def run(
        self,
        sampler: WorkerGroup,
        requests: list[Request],
        seen: Callable[[Sequence[Rollout]], None] | None = None,
    ) -> list[Rollout]:
        """Run an episode for each request; rollouts in their order, also given to ``seen`` as they finish."""

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse data that lacks a column that the environment reads."""

    def metrics(self) -> Mapping[str, float]:
        """Return what was counted since the last call."""

    def close(self) -> None:
        """End the environment."""


class EarlyStop(Protocol):
    """Ends a step as soon as enough groups are complete; what it stopped is dropped, or carried into later steps.

    Attributes:
        off_policy: tokens of older policies come into the update.
    """

    off_policy: bool

    def to_take(self, wanted: int) -> int:
        """Return how many prompts to take from the data for a round of ``wanted`` groups."""

    def sample(
        self,
        prompts: Sequence[Prompt],
        step: int,
        first_group: int,
        request_of: Callable[[Prompt, str], Request],
    ) -> list[Rollout]:
        """Sample until as many groups as wanted are complete; return them, carried ones first.

        Args:
            prompts: new ones.
            step: its number, a part of the ids of requests.
            first_group: number of the first group that is returned.
            request_of: makes the request of a prompt under an id.
        """

    def metrics(self) -> Mapping[str, float]:
        """Return what was counted since the last call, ``sampling/...``."""

    def files(self) -> Mapping[str, Callable[[Path], object]]:
        """Return what writes each file of a checkpoint: ``CARRIED`` where groups are carried."""

    def load(self, folder: Path) -> None:
        """Take the groups that a checkpoint carries; without the file, none."""


class SamplerProcess(Protocol):
    """Samplers in processes of their own, perhaps with the interpreter of another environment."""

    def make(
        self,
        config: RolloutConfig,
        model_config: ModelConfig,
        context: WorkerContext,
        source: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
    ) -> RolloutEngine:
        """Return the sampler that ``[rollout.process]`` asks for.

        Args:
            config: the ``[rollout]`` table.
            model_config: the ``[model]`` table.
            context: of the worker that owns the sampler.
            source: streams the actor's weights to a process that is started again; None: the sampler keeps a copy.
        """

    def foreign_plugin(self, python: str, name: str, plugins: PluginSet) -> tuple[RolloutBackend, Plugin]:
        """Return a rollout engine as another environment offers it.

        Args:
            python: its interpreter.
            name: of the engine.
            plugins: of the run, loaded in this environment.

        Raises:
            PluginError: it cannot be had there.
        """


class RowWorkers(Protocol):
    """Processes that read, render and tokenize rows ahead of the trainer.

    Attributes:
        restarts: processes that were replaced so far.
    """

    restarts: int

    def results(self, chunks: Iterator[list[int]]) -> Iterator[list[dict[str, Any]]]:
        """Yield the outcomes of each chunk of row numbers, in order; take chunks ahead of what was asked for."""

    def close(self) -> None:
        """End the processes."""


class Launcher(Protocol):
    """Serves ranks that an external launcher started."""

    def controlling(self) -> AbstractContextManager[bool]:
        """Yield whether this process runs its command; at the end the other ranks learn that no session follows."""

    def serve(self) -> int:
        """Be a worker in each session of the command; return the exit code."""
