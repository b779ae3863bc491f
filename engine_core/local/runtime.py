"""The local runtime: all workers run in the controller's process, without a launcher or sockets."""

from __future__ import annotations

import functools
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from engine_core import timeline
from engine_core.contracts.engines import RolloutEngine
from engine_core.contracts.runtime import Role, Runtime, WorkerGroup
from engine_core.local.engine_host import Engine, EngineHost, RankPlacement, default_device
from engine_core.sampling import stream

if TYPE_CHECKING:
    from engine_core.contracts.weight_sync import SyncResult
    from engine_core.types import Batch, Request, Rollout


class LocalGroup(WorkerGroup):
    """A group of one engine in this process; calls block and return a completed future."""

    def __init__(self, engine: Engine, role: str = "rollout") -> None:
        self.engine = engine
        self._span = functools.partial(timeline.span, group=role, lane="rank 0")

    def call(self, method: str, batch: Batch | None = None, split: str = "dp", **plain: Any) -> Future[Any]:
        """Call the engine's method and return a completed future."""
        future: Future[Any] = Future()
        arguments = () if batch is None else (batch,)
        with self._span(method):
            future.set_result(getattr(self.engine, method)(*arguments, **plain))
        return future

    def stream(self, requests: Sequence[Request]) -> Generator[list[Rollout], None, None]:
        """Yield rollouts after each engine step; an engine with an overridden ``generate`` yields all at once."""
        engine: Any = self.engine
        with self._span("generate"):
            if type(engine).generate is RolloutEngine.generate:
                yield from stream(engine, requests)
            else:  # the engine overrides generate
                yield engine.generate(requests)


class LocalRuntime(Runtime):
    """The runtime with all roles in one process; the sampler uses the actor's module if both engines support it."""

    in_process = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.host = EngineHost(self.config, self.plugins, self.live, RankPlacement(default_device()))

    @property
    def engines(self) -> dict[str, Engine]:
        """The engines by role."""
        return self.host.engines

    def start(self, roles: Mapping[str, Role], total_steps: int) -> dict[str, WorkerGroup]:
        """Build the engines in this process."""
        self.host.build(roles, total_steps)
        self._trade("start")  # offload models of rewards until they are used
        self.shared = self.host.shared
        return {name: LocalGroup(engine, name) for name, engine in self.host.engines.items()}

    def push_weights(self, source: str, target: str, version: int) -> SyncResult:
        """Copy weights within the process."""
        return self.host.push_weights(source, target, version)

    def mix_weights(self, source: str, target: str, mix: float) -> None:
        """Mix weights within the process."""
        self.host.mix_weights(source, target, mix)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Offload engines that are idle in the phase, with ``offload_idle_roles``."""
        self._trade(name)
        yield

    def close(self) -> None:
        """Close the engines."""
        self.host.close()

    def _trade(self, phase: str) -> None:
        if getattr(self.config.runtime.options, "offload_idle_roles", False):
            start = time.perf_counter()
            self.host.trade(phase)
            self.traded_seconds += time.perf_counter() - start
