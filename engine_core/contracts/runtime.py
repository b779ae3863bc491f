"""Contract 3: a runtime starts worker groups; a group carries out calls, in order, wherever it sits.

What crosses is plain values, batches and names, never code, so that the same trainer runs in one
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
    from engine_core.config import EngineConfig
    from engine_core.contracts.weight_sync import SyncResult
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.types import Batch, Request, Rollout


REWARD_PHASE = "reward"
"""The phase of a step in which rewards are computed, and in which the models of rewards have device memory."""


@dataclass(frozen=True, slots=True)
class Role:
    """One role of a run: what to build for it."""

    kind: str  # "train" or "rollout"
    trainable: bool = True  # a train role with an optimizer
    refreshed: bool = False  # not trained, but its weights change (a reference that follows the actor)
    idle_steps: int = 0  # of the run's optimizer steps, those in which it is not trained
    told: str = ""  # the role that its engine and hooks are told, where that is not its own name
    phase: str = ""  # it is asked in this phase alone, and needs no device memory in another

    @property
    def saved(self) -> bool:
        """Whether a checkpoint must hold it: weights that are not those of the model folder."""
        return self.kind == "train" and (self.trainable or self.refreshed)


class WorkerGroup(abc.ABC):
    """The workers of one role, behind one ordered mailbox each.

    Attributes:
        repeatable: the same seed gives the same values here, so whoever stops samplers early asks them in rounds: which
            rollouts are finished by a round does not depend on the time.
    """

    repeatable: bool = True

    @property
    def world_size(self) -> int:
        """Processes of this role."""
        return 1

    @abc.abstractmethod
    def call(self, method: str, batch: Batch | None = None, split: str = "dp", **plain: Any) -> Future[Any]:
        """Have every worker call ``engine.method(batch, **plain)``.

        Args:
            method: a method of the engine contract.
            batch: sequences for it; None for methods that take none.
            split: ``dp`` gives each data-parallel slice its share and puts the results back in
                order; ``all`` gives every worker the whole batch.
            plain: plain values and named things.

        Returns:
            A future of the result. A worker that died or missed the deadline is ``WorkerLost``.
        """

    def stream(self, requests: Sequence[Request]) -> Generator[list[Rollout], None, None]:
        """Have a sampler group sample all requests; rollouts in parts, as they finish.

        The same rollouts as those of ``call("generate")``. By default all at once, at the end.

        Args:
            requests: with distinct ids. Whoever does not want the rest closes the iterator.
        """
        yield self.call("generate", requests=list(requests)).result()

    def flow(self, tell: Callable[[list[Rollout]], None], changed: Callable[[], None]) -> Flow | None:
        """Have samplers go on by themselves, where each of them can; None where they are asked in rounds of ``advance``.

        Args:
            tell: is given rollouts as they finish, in some thread.
            changed: is told in some thread that ``resting`` or ``error`` is to be looked at.
        """
        return None


class Flow(Protocol):
    """Requests that samplers work on until they receive other ones."""

    error: BaseException | None

    @property
    def resting(self) -> bool:
        """Whether a sampler has something to sample and was told something else since."""

    def go(self, requests: Sequence[Request] = (), dropped: Iterable[str] = ()) -> None:
        """Have these sampled, forget those, and have all go on that rest."""

    def close(self) -> None:
        """Nobody waits for anything of it any more."""


class Runtime(abc.ABC):
    """Starts and stops the workers of a run.

    Args:
        config: the whole run file.
        plugins: loaded in the controller; workers elsewhere load their own from the names.
        live: objects given from Python (``model``, ``tokenizer``); only a local runtime takes a model.
    """

    in_process = False  # workers are in the controller's process
    traded_seconds = 0.0  # so far, in which device memory was handed over between roles
    shared = False  # the sampler reads the actor's own module: the two are one policy

    def __init__(self, config: EngineConfig, plugins: PluginSet, live: Mapping[str, Any]) -> None:
        self.config, self.plugins, self.live = config, plugins, live

    @abc.abstractmethod
    def start(self, roles: Mapping[str, Role], total_steps: int) -> dict[str, WorkerGroup]:
        """Build the engines of these roles; when one fails, those built before it are closed.

        Args:
            roles: what to build, by role name.
            total_steps: optimizer steps of the run, for schedules.
        """

    @abc.abstractmethod
    def push_weights(self, source: str, target: str, version: int) -> SyncResult:
        """Bring a sampler to a trained role's weights, worker to worker."""

    def mix_weights(self, source: str, target: str, mix: float) -> None:
        """Bring an untrained role part of the way to a trained one, worker to worker.

        Args:
            source: the trained role.
            target: of the same model.
            mix: share of the source in the target's new weights.
        """
        raise NotImplementedError(f"{type(self).__name__} cannot refresh a reference model.")

    def loss_metrics(self) -> dict[str, float]:
        """Of samplers that were lost and replaced since it was last asked, ``sampling/...``; {} where none may be."""
        return {}

    def memory_metrics(self) -> dict[str, float]:
        """Memory of the workers now, ``memory/ROLE/...`` in GiB, the most of a role's ranks; by default they are this process."""
        return {}

    def give_up(self) -> None:
        """A stop has interrupted this thread: what it has asked workers for is left, where it may be. By default nothing is in hand."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Hand device memory over for ``generate``, ``reward``, ``train`` or ``sync``; by default nobody sleeps."""
        yield

    @abc.abstractmethod
    def close(self) -> None:
        """Stop every worker."""
