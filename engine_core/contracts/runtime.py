"""Contract 3: a runtime starts worker groups; a group carries out calls in order, in whatever process it runs.

Calls carry plain values, batches and names, never code, so that the same trainer runs in one
process and on a cluster.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from engine_core.config import EngineConfig
    from engine_core.contracts.weight_sync import SyncResult
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.types import Batch, Request, Rollout


REWARD_PHASE = "reward"
"""The phase of a step in which rewards are computed, and in which the models of rewards have device memory."""


@dataclass(frozen=True, slots=True)
class Role:
    """A role of a run: what to build for it."""

    kind: str  #: "train" or "rollout"
    trainable: bool = True  #: a train role with an optimizer
    refreshed: bool = False  #: not trained, but its weights change (a reference that follows the actor)
    mixed: bool = False  #: refreshed by shares of the actor's weights, not by copies
    idle_steps: int = 0  #: number of the run's optimizer steps in which it is not trained
    engine_role: str = ""  #: the role's name for its engine and hooks; "": its own name
    phase: str = ""  #: the only phase in which it is used and needs device memory

    @property
    def saved(self) -> bool:
        """Whether checkpoints must hold the role, because its weights differ from the model folder's."""
        return self.kind == "train" and (self.trainable or self.refreshed)


class WorkerGroup(abc.ABC):
    """The workers of one role, each with an ordered queue of calls.

    Attributes:
        repeatable: whether the same seed gives the same values. If so, early stopping samples in rounds: which
            rollouts a round finishes does not depend on time.
    """

    repeatable: bool = True

    @property
    def world_size(self) -> int:
        """Number of processes of this role."""
        return 1

    @abc.abstractmethod
    def call(self, method: str, batch: Batch | None = None, split: str = "dp", **plain: Any) -> Future[Any]:
        """Have every worker call ``engine.method(batch, **plain)``.

        Args:
            method: a method of the engine contract.
            batch: its sequences; None for a method without a batch.
            split: ``dp`` gives each data-parallel slice its share and puts the results back in
                order; ``all`` gives every worker the whole batch.
            plain: plain values and names.

        Returns:
            A future of the result. It raises ``WorkerLost`` if a worker died or missed the deadline.
        """

    def stream(self, requests: Sequence[Request]) -> Generator[list[Rollout], None, None]:
        """Sample all requests with a sampler group; yield lists of rollouts as they finish.

        The rollouts are those of ``call("generate")``. By default they come in one list, at the end. A caller that
        does not want the rest closes the generator.

        Args:
            requests: requests with distinct ids.
        """
        yield self.call("generate", requests=list(requests)).result()

    def flow(self, tell: Callable[[list[Rollout]], None], changed: Callable[[], None]) -> Flow | None:
        """Start continuous sampling, if each sampler supports it; None: call ``advance`` in rounds instead.

        Args:
            tell: called with rollouts as they finish, in any thread.
            changed: called in any thread when ``resting`` or ``error`` has to be checked.
        """
        return None


class Flow(Protocol):
    """Continuous sampling: samplers work on their requests until they receive other commands."""

    error: BaseException | None  #: why sampling failed; None: it did not

    @property
    def resting(self) -> bool:
        """Whether a sampler has requests but no command of this flow, so that ``go`` must make it continue."""

    def go(self, requests: Sequence[Request] = (), dropped: Iterable[str] = ()) -> None:
        """Queue new requests, cancel the dropped ids, and let stopped samplers continue."""

    def close(self) -> None:
        """Cancel all requests and release the samplers."""


class Runtime(abc.ABC):
    """A runtime, which starts and stops the workers of a run.

    Args:
        config: the whole run file.
        plugins: loaded in the controller; workers in other processes load plugins by name.
        live: objects given from Python (``model``, ``tokenizer``); only a local runtime takes a model.
    """

    in_process = False  #: whether workers are in the controller's process
    traded_seconds = 0.0  #: total time so far of handing device memory over between roles
    shared = False  #: whether the sampler reads the actor's own module, so that both are one policy

    def __init__(self, config: EngineConfig, plugins: PluginSet, live: Mapping[str, Any]) -> None:
        self.config, self.plugins, self.live = config, plugins, live  #: constructor argument

    @abc.abstractmethod
    def start(self, roles: Mapping[str, Role], total_steps: int) -> dict[str, WorkerGroup]:
        """Build the engines of these roles; if one fails, close those built before it.

        In each process torch is seeded with ``run.seed`` before the first engine is built.

        Args:
            roles: what to build, by role name.
            total_steps: optimizer steps of the run, for schedules.
        """

    @abc.abstractmethod
    def push_weights(self, source: str, target: str, version: int) -> SyncResult:
        """Send a trained role's weights to a sampler, worker to worker."""

    def mix_weights(self, source: str, target: str, mix: float) -> None:
        """Mix a trained role's weights into an untrained role, worker to worker.

        Args:
            source: the trained role.
            target: the untrained role, of the same model.
            mix: share of the source in the target's new weights.

        Raises:
            NotImplementedError: by default.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot refresh a reference model.")

    def loss_metrics(self) -> dict[str, float]:
        """Return ``sampling/...`` metrics of samplers lost and replaced since the last call; {} if none can be."""
        return {}

    def memory_metrics(self) -> dict[str, float]:
        """Return the workers' memory, ``memory/ROLE/...`` in GiB, the maximum over ranks; {} if all are this process."""
        return {}

    def give_up(self) -> None:
        """Abandon this thread's in-flight commands that are safe to interrupt, after a stop; by default none exist."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Hand device memory over for the phase ``generate``, ``reward``, ``train`` or ``sync``; by default do nothing."""
        yield

    @contextmanager
    def profiled(self, folder: Path) -> Iterator[None]:
        """Profile every process during the context, by default this one; each writes its files into ``folder``."""
        with self.plugins.require("parts", "profiler")(folder, "rank_0"):
            yield

    @abc.abstractmethod
    def close(self) -> None:
        """Stop every worker."""
