"""Parts of a run that the core calls by name and that a plugin offers (hook ``engine_parts``).

=====================  =======================  ========================================================
name                   protocol                 needed by
=====================  =======================  ========================================================
``reward_workers``     ``RewardWorkers``        ``[[reward]]`` with ``workers`` above 0
``reward_models``      ``RewardModels``         ``[reward.model]``, ``[reward.judge]``, ``[reward.verdict]``
``episodes``           ``Episodes`` (class)     ``[environment]``
``row_workers``        ``RowWorkers`` (class)   ``data.num_workers`` above 0
``early_stop``         ``EarlyStop`` (class)    ``rollout.over_sampling`` above 1
``stream_update``      a function               ``rollout.stream_update``, ``rollout.stream_deterministic``
``plan_check``         a function               the log at the end of a run, where it is installed
``health``             a class                  the conditions of a run after each step, where it is installed
``trackers``           ``TrackerThreads``       ``tracking.trackers``
``timeline``           ``TimelineWriter``       each step, where it is installed
``profiler``           a context manager        ``[profile]``; called with a folder and the beginning of the file names
``completion``         a function               what a shell completes
``set_metrics``        a function               evaluations of trainers that sample; returns metrics of the rollouts of a ``HeldOut``
``curriculum``         ``CurriculumRounds``     ``data.curriculum``
``dry_run``            a function               ``engine train --dry-run``
``memory_plan``        a function               engines on an accelerator, before they are built
``faults``             a class                  ``ENGINE_FAULT``, in tests
``sampler_process``    ``SamplerProcess``       ``[rollout.process]``
``launcher``           ``Launcher``             a command that ``torchrun`` starts on every rank
=====================  =======================  ========================================================
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from numpy.typing import NDArray
    from torch import Tensor

    from engine_core.config import EngineConfig, ModelConfig, RolloutConfig
    from engine_core.contracts.engines import RolloutEngine, WorkerContext
    from engine_core.contracts.runtime import Role, WorkerGroup
    from engine_core.data.rows import Rows
    from engine_core.plugins.plugin_set import Plugin, PluginSet
    from engine_core.rewards.models import ModelReward, OnFailure
    from engine_core.rewards.signatures import Outcome, Signature
    from engine_core.sampler_session import SamplerSession
    from engine_core.specs import RolloutBackend
    from engine_core.types import Prompt, Request, Rollout

CARRIED = "carried.parquet"
"""File of a checkpoint with the groups that ``early_stop`` carries into later steps."""


class RewardPool(Protocol):
    """The worker processes of one reward.

    Attributes:
        name: name of the reward.
        signature: signature of its function; None until the first worker has started.
        outcomes: outcomes of the samples of the current step, by position; None: not done yet.
        restarts: number of workers that were replaced so far.
    """

    name: str
    signature: Signature | None
    outcomes: list[Outcome | None]
    restarts: int

    def begin(self, columns: Mapping[str, Sequence[Any]], count: int) -> None:
        """Take ``count`` samples, which ``RewardWorkers.drive`` will score."""

    def expect(self, count: int) -> None:
        """Expect ``count`` samples, which arrive in parts."""

    def close(self) -> None:
        """End the workers."""


class EarlyScores(Protocol):
    """A scoring in progress that overlaps sampling.

    Attributes:
        rollouts: in the order of the requests; None: not sampled yet.
        pools: the workers that score them.
        on_failure: called with each failed sample.
        busy_seconds: time in which samples were being scored.
    """

    rollouts: list[Any]
    pools: Sequence[RewardPool]
    on_failure: OnFailure
    busy_seconds: float

    def expect(self, requests: Sequence[Request]) -> None:
        """Prepare for the rollouts of these requests."""

    def take(self, rollouts: Sequence[Rollout]) -> None:
        """Take rollouts as they finish, and score groups that are complete."""

    def seal(self) -> None:
        """Note that all rollouts have been sampled."""

    def cancel(self) -> None:
        """Cancel the scoring."""


class RewardWorkers(Protocol):
    """Rewards in processes that are killed and replaced when a sample takes too long."""

    def pool(self, name: str, order: Mapping[str, Any], size: int) -> RewardPool:
        """Return the worker pool of one reward; no worker is started yet.

        Args:
            name: name of the reward.
            order: the first message to each worker: ``reward``, ``options``, ``modules``, ``root``, ``allow_code``,
                ``path``, ``timeout`` (seconds), ``max_memory_gb``.
            size: number of workers.
        """

    def start(self, pools: Sequence[RewardPool]) -> None:
        """Start the workers that are not running yet.

        Raises:
            EngineError: a reward does not load. No process is left running.
        """

    def drive(self, pools: Sequence[RewardPool], on_failure: OnFailure) -> None:
        """Keep the workers of all pools busy until each sample has an outcome.

        Args:
            pools: worker pools that have taken samples.
            on_failure: called with each failed sample; an error that it raises ends the scoring.
        """

    def early(
        self,
        pools: Sequence[RewardPool],
        on_failure: OnFailure,
        rollouts: list[Any],
        arguments: Callable[[Any, Sequence[Rollout]], Mapping[str, Sequence[Any]]],
    ) -> EarlyScores:
        """Return a scoring that begins with complete groups while others are sampled.

        Args:
            pools: started pools of rewards that score samples in any parts.
            on_failure: called with each failed sample; an error that it raises ends the scoring.
            rollouts: a list with a place for each sample, filled as they arrive.
            arguments: returns the arguments of a pool's function for rollouts.
        """


class TrackerThreads(Protocol):
    """The trackers of a run; built with the run folder, the config and the plugins before the run starts."""

    def start(self) -> None:
        """Start the trackers."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send finite metrics of a step to the trackers; wait for none."""

    def event(self, event: str, step: int, data: Mapping[str, Any]) -> None:
        """Send an event to the trackers; wait for none."""

    def close(self) -> None:
        """End the trackers; leave one behind that does not end in time."""


class TimelineWriter(Protocol):
    """The writer of the controller's spans (``engine_core.timeline``); built with the run folder's path and the trainer."""

    def write(self, processes: Mapping[str, int], metrics: Mapping[str, float]) -> dict[str, float]:
        """Write the spans since the last call; return metrics of them.

        Args:
            processes: number of processes by role.
            metrics: metrics of the step so far.
        """

    def close(self) -> None:
        """Write the rest."""


class RewardModels(Protocol):
    """Rewards computed by a model of the run: reward models, judges, verdicts."""

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
        """Return the ``ModelReward`` of each reward that has a model; refuse a set-up that cannot work.

        Args:
            config: config of the run.
            plugins: plugins of the run.
            group_of: returns the workers of a role; called only when a value is needed.
            tokenizer: the actor's tokenizer; None if there are only texts, no sampled tokens.
            columns: columns of the data.
        """


class Episodes(Protocol):
    """The environment of a run, which samples responses of several turns.

    Attributes:
        reward_weights: weights of the rewards that episodes set, by name.
    """

    reward_weights: Mapping[str, float]

    def session(self, turns: SamplerSession) -> SamplerSession:
        """Return a session whose requests are episodes; ``turns`` samples their turns. Its ``results`` has no timeout."""

    def stream(self, group: WorkerGroup, requests: Sequence[Request]) -> Generator[list[Rollout], None, None]:
        """Run an episode for each request with a sampler that does nothing else; yield rollouts as episodes end."""

    def check_failures(self, rollouts: Sequence[Rollout]) -> None:
        """Refuse the rollouts of a step of which too many have failed."""

    def check_columns(self, columns: Collection[str]) -> None:
        """Refuse data without a column that the environment reads."""

    def metrics(self, held_out: bool = False) -> Mapping[str, float]:
        """Return the metrics of the episodes since the last call, in training or of held-out prompts."""

    def close(self) -> None:
        """End the environment."""


class EarlyStop(Protocol):
    """A part that ends sampling once enough groups are complete; the others are dropped or carried into later steps.

    Attributes:
        off_policy: whether updates include tokens of older policies.
    """

    off_policy: bool

    def to_take(self, wanted: int, version: int) -> int:
        """Return how many prompts to take from the data for a round of ``wanted`` groups.

        Args:
            wanted: groups that the round needs.
            version: policy version of the sampler.
        """

    def sample(
        self,
        prompts: Sequence[Prompt],
        step: int,
        first_group: int,
        request_of: Callable[[Prompt, str], Request],
    ) -> list[Rollout]:
        """Sample until as many groups as wanted are complete; return them, carried ones first.

        Args:
            prompts: new prompts.
            step: step number, a part of the request ids.
            first_group: number of the first group that is returned.
            request_of: returns the request for a prompt and an id.
        """

    def metrics(self) -> Mapping[str, float]:
        """Return ``sampling/...`` metrics since the last call."""

    def files(self) -> Mapping[str, Callable[[Path], object]]:
        """Return the functions that write files of a checkpoint, by file: ``CARRIED`` if groups are carried."""

    def load(self, folder: Path) -> None:
        """Load the groups that a checkpoint carries; none if it lacks the file."""


class StreamUpdate(Protocol):
    """The update of a step from parts: complete groups, while others are sampled; made from the run's trainer.

    Attributes:
        streams: whether groups are learned from while others are sampled, so that ``draw`` is used.
    """

    streams: bool

    def draw(self, requests: Sequence[Request], step: int) -> tuple[list[Rollout], Any]:
        """Sample, reward and accumulate gradients; return the rollouts in order and their rewards for ``score``."""

    def finish(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Add the gradients of the groups that are left, scale them, do the optimizer step; return its metrics."""


class CurriculumRounds(Protocol):
    """The rounds of rows that a curriculum chooses; a class, made of its name, its options and the plugins.

    Its static method ``problems``, with the config, the plugins, the trainer's spec and the names of objects from Python,
    yields why the run cannot have the curriculum.
    """

    def order(self, rows: Rows, number: int) -> NDArray[Any]:
        """Return the numbers of the rows of round ``number`` in their order: [N] integers."""

    def report(self, rollouts: Iterable[Rollout]) -> None:
        """Report the rollouts of a step to a curriculum that learns from rewards."""

    def state(self, number: int) -> dict[str, Any] | None:
        """Return the state of a curriculum that learns from rewards, in round ``number``; else None."""

    def load_state(self, state: Mapping[str, Any], number: int) -> None:
        """Continue in round ``number`` from the result of ``state``."""


class SamplerApart(Protocol):
    """A sampler whose processes load libraries while memory is planned and the actor is built on the same device."""

    def build(self, config: RolloutConfig) -> RolloutEngine:
        """Build the engines by the ``[rollout]`` table, which a memory plan may have changed; return the sampler."""

    def close(self) -> None:
        """End the processes, built or not."""


class SamplerProcess(Protocol):
    """Samplers in separate processes, which may use the Python interpreter of another environment."""

    def make(
        self,
        config: RolloutConfig,
        model_config: ModelConfig,
        context: WorkerContext,
        source: Callable[[], Iterable[tuple[str, Tensor]]] | None = None,
    ) -> SamplerApart:
        """Start the processes that ``[rollout.process]`` asks for; return their sampler, whose ``build`` comes later.

        Args:
            config: the ``[rollout]`` table.
            model_config: the ``[model]`` table.
            context: of the worker that owns the sampler.
            source: streams the actor's weights, tensors ``[D1, ..., Dn]``, to a process that is started again; None:
                the sampler keeps a copy.
        """

    def foreign_plugin(self, python: str, name: str, plugins: PluginSet) -> tuple[RolloutBackend, Plugin]:
        """Return a rollout engine that another Python environment offers.

        Args:
            python: interpreter of that environment.
            name: name of the engine.
            plugins: plugins of the run, loaded in this environment.

        Raises:
            PluginError: the other environment does not offer the engine.
        """


class RowWorkers(Protocol):
    """Processes that read, render and tokenize rows ahead of the trainer.

    Attributes:
        restarts: number of processes that were replaced so far.
    """

    restarts: int

    def results(self, chunks: Iterator[list[int]]) -> Iterator[list[dict[str, Any]]]:
        """Yield the outcomes of each chunk of row numbers, in order; chunks are taken ahead of the consumer."""

    def close(self) -> None:
        """End the processes."""


class Launcher(Protocol):
    """A part that serves ranks started by an external launcher."""

    def controlling(self) -> AbstractContextManager[bool]:
        """Yield whether this process runs the command; at the end tell the other ranks that no session follows."""

    def serve(self) -> int:
        """Work as a worker in each session of the command; return the exit code."""
