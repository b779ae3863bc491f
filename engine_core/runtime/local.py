"""The local runtime: workers in the controller's process. No launcher, no sockets."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch

from engine_core.config.models import PlacementConfig
from engine_core.engines.base import RolloutEngine, TrainEngine, WorkerContext
from engine_core.runtime.base import Role, Runtime, WorkerGroup
from engine_core.weight_sync import SyncResult, same_process

if TYPE_CHECKING:
    from engine_core.specs import RolloutBackend, TrainBackend
    from engine_core.types import Batch

log = logging.getLogger("engine")


class LocalGroup(WorkerGroup):
    """One engine, called at once; the future is done when it is returned."""

    def __init__(self, engine: TrainEngine | RolloutEngine) -> None:
        self.engine = engine

    def call(self, method: str, batch: Batch | None = None, split: str = "dp", **plain: Any) -> Future[Any]:
        future: Future[Any] = Future()
        arguments = () if batch is None else (batch,)
        future.set_result(getattr(self.engine, method)(*arguments, **plain))
        return future


class LocalRuntime(Runtime):
    """Actor, reference, critic and sampler in one process; the sampler uses the actor's module where both can."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engines: dict[str, TrainEngine | RolloutEngine] = {}
        self.shared = False
        self._stack = ExitStack()

    def start(self, roles: Mapping[str, Role], total_steps: int) -> dict[str, WorkerGroup]:
        torch.manual_seed(self.config.run.seed)
        if self.config.placement != PlacementConfig():
            log.info("Not read: [placement]; the local runtime has one pool, this process.")
        try:
            for name, role in roles.items():
                build = self._build_train if role.kind == "train" else self._build_rollout
                self.engines[name] = build(name, role, total_steps)
                self._stack.callback(self.engines[name].close)
        except BaseException:
            self.close()
            raise
        return {name: LocalGroup(engine) for name, engine in self.engines.items()}

    def push_weights(self, source: str, target: str, version: int) -> SyncResult:
        return same_process(self.engines[source], self.engines[target], version, self.shared)

    def mix_weights(self, source: str, target: str, mix: float) -> None:
        trained, other = (cast("TrainEngine", self.engines[role]) for role in (source, target))
        other.load_named_weights(trained.named_weights(), mix)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if getattr(self.config.runtime.options, "trade_memory", False):
            self._trade(name)
        yield

    def close(self) -> None:
        self._stack.close()

    def _trade(self, phase: str) -> None:
        """Order matters: who gives memory back goes before who takes it."""
        trainers = [e for e in self.engines.values() if isinstance(e, TrainEngine)]
        samplers = [e for e in self.engines.values() if isinstance(e, RolloutEngine)]
        if phase == "generate":
            for trainer in trainers:
                trainer.sleep(keep=("weights",))
            for sampler in samplers:
                sampler.wake()
        elif phase == "train":
            for sampler in samplers:
                sampler.sleep(keep=("weights",))
            for trainer in trainers:
                trainer.wake()

    def _build_train(self, name: str, role: Role, total_steps: int) -> TrainEngine:
        config = self.config.role(name)
        engine = self.plugins.resolve("train_engines", config.backend)
        context = self._context(name, max(total_steps - role.idle_steps, 0))
        return engine(config, self.config.model, context, trainable=role.trainable)

    def _build_rollout(self, name: str, role: Role, total_steps: int) -> RolloutEngine:
        config = self.config.rollout
        actor = self.engines.get("actor")
        context = self._context(name, total_steps)
        self.shared = isinstance(actor, TrainEngine) and self._can_share()
        if self.shared:
            live = {**(context.live or {}), "model": actor.module}  # type: ignore[union-attr]
            context = dataclasses.replace(context, live=live, device=actor.context.device)  # type: ignore[union-attr]
        engine = self.plugins.resolve("rollout_engines", config.backend)(config, self.config.model, context)
        if self.shared:
            engine.share_module(actor)
            log.info("The sampler uses the actor's own module: weight sync moves nothing.")
        return engine

    def _can_share(self) -> bool:
        trainer = cast("TrainBackend", self.plugins.spec("train_engines", self.config.actor.backend))
        sampler = cast("RolloutBackend", self.plugins.spec("rollout_engines", self.config.rollout.backend))
        return "generation_module" in trainer.capabilities and "share_module" in sampler.capabilities

    def _context(self, role: str, total_steps: int) -> WorkerContext:
        return WorkerContext(
            plugins=self.plugins,
            role=role,
            device=default_device(),
            seed=self.config.run.seed,
            deterministic=self.config.run.deterministic,
            total_steps=total_steps,
            live=self.live,
        )


def default_device() -> torch.device:
    """The accelerator, where torch was built for one and one is there; else the CPU."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    return torch.accelerator.current_accelerator() or torch.device("cpu")
