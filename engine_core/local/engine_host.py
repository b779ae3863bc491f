"""The engines of one process: construction, weight transfer between them, and offloading by phase."""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from engine_core import timeline
from engine_core.contracts.engines import RolloutEngine, TrainEngine, WorkerContext
from engine_core.contracts.weight_sync import SyncResult, same_process, sends_adapter, stream_of
from engine_core.errors import ConfigError
from engine_core.local.device_memory import device_bytes, has_others
from engine_core.local.host_memory import keep_freed_memory

if TYPE_CHECKING:
    from torch import Tensor

    from engine_core.config import EngineConfig
    from engine_core.contracts.parts import SamplerApart, SamplerProcess
    from engine_core.contracts.runtime import Role
    from engine_core.plugins.plugin_set import PluginSet
    from engine_core.specs import RolloutBackend, TrainBackend, TrainerSpec

log = logging.getLogger("engine")

Engine = TrainEngine | RolloutEngine


@dataclass(frozen=True)
class RankPlacement:
    """The device of a process and its rank within its pool."""

    device: torch.device
    rank: int = 0
    world_size: int = 1


def check_ranks(config: EngineConfig, role: str, engine: type[TrainEngine], processes: int) -> None:
    """Refuse an engine of one process for a role whose pool has several.

    Args:
        config: the run's.
        role: name of a train role.
        engine: the class of its engine.
        processes: size of the role's pool.

    Raises:
        ConfigError: the engine trains in one process.
    """
    if processes > 1 and engine.layout is TrainEngine.layout:
        raise ConfigError(
            f"{role}.backend = '{config.role(role).backend}' trains in one process, and the pool of '{role}' has "
            f"{processes}. Use a backend that shards or copies the model over ranks, or set "
            f"runtime.{config.runtime.backend}.processes = 1."
        )


def check_sampler(config: EngineConfig, plugins: PluginSet, name: str, role: Role, processes: int) -> None:
    """Refuse a sampler whose options do not fit its pool; one with separate processes fits any.

    Args:
        config: the run's.
        plugins: the run's.
        name: name of the role.
        role: the role.
        processes: size of the role's pool.

    Raises:
        ConfigError: names the key.
    """
    table = config.sampler(name)
    if table.process is None:
        engine: type[RolloutEngine] = plugins.resolve("rollout_engines", table.backend)
        engine.check_pool(table, role.engine_role or name, processes)


@contextmanager
def naming_table(config: EngineConfig, name: str, role: Role) -> Iterator[None]:
    """Let an error name the table that a role is built from, if no table has the role's name.

    Args:
        config: the run's.
        name: name of the role.
        role: the role.

    Raises:
        ConfigError: the error, with the keys of the run file.
    """
    try:
        yield
    except ConfigError as error:
        reward, shown = config.rewarding(name), role.engine_role or name
        if reward is None and name in type(config).model_fields:
            raise
        table = "actor" if reward is None else f"reward.{next(iter(reward.models))}"
        raise ConfigError(
            [re.sub(rf"\b{shown}(?=\.[a-z])", table, text) for text in error.problems]
        ) from error


class EngineHost:
    """The engines of this process: actor, reference, critic, sampler, models of rewards.

    The sampler uses the actor's module if both engines support it and ``rollout.weights`` allows it.

    Args:
        config: the whole run file.
        plugins: the plugins loaded in this process.
        live: objects passed from Python, and the tokenizer.
        place: device and rank of this process.
    """

    def __init__(
        self, config: EngineConfig, plugins: PluginSet, live: Mapping[str, Any], place: RankPlacement
    ) -> None:
        self.config, self.plugins, self.live, self.place = config, plugins, live, place
        self.engines: dict[str, Engine] = {}
        self.guests: dict[str, Role] = {}  # roles that are used in one phase alone
        self.shared = False  # True: the sampler uses the actor's module
        self._apart: dict[str, SamplerApart] = {}  # samplers in separate processes
        self._stack = ExitStack()

    def build(self, roles: Mapping[str, Role], total_steps: int) -> None:
        """Check that each engine supports its role, then build all roles.

        Args:
            roles: the roles of this process, built in this order.
            total_steps: optimizer steps of the run; 0 if unknown.

        Raises:
            EngineError: a role cannot be built. The engines built so far are closed.
        """
        torch.manual_seed(self.config.run.seed)
        if self.place.device.type == "cpu":
            keep_freed_memory()
        try:
            for name, role in roles.items():  # they load libraries meanwhile
                if role.kind != "train" and self.config.sampler(name).process is not None:
                    self._apart[name] = self._start_apart(name, roles, total_steps)
                    self._stack.callback(self._apart[name].close)
            self.check(roles, total_steps)
            with timeline.span("plan memory"):
                self._plan_memory(roles)
            for name, role in roles.items():
                log.info("Building the role %s.", name)
                build = self._build_train if role.kind == "train" else self._build_rollout
                with timeline.span(f"build {name}"):
                    self.engines[name] = build(name, role, total_steps)
                self._stack.callback(self.engines[name].close)
                if role.phase:
                    self.guests[name] = role
        except BaseException:
            self.close()
            raise

    def check(self, roles: Mapping[str, Role], total_steps: int = 0) -> None:
        """Check that each engine supports its role; the arguments are those of ``build``.

        Raises:
            ConfigError: this machine or this pool cannot serve an option.
        """
        for name, role in roles.items():
            if role.kind != "train":
                check_sampler(self.config, self.plugins, name, role, self.place.world_size)
                continue
            context = self._train_context(name, role, total_steps)
            with naming_table(self.config, name, role):
                self._train_class(name).check(self.config.role(name), context, trainable=role.trainable)

    def _plan_memory(self, roles: Mapping[str, Role]) -> None:
        """Set what the part ``memory_plan`` chooses for this accelerator, where the part is installed.

        Raises:
            ConfigError: nothing that the run file allows fits.
        """
        total, given = device_bytes(self.place.device), self.live.get("model") is not None
        known = total and not given and not self.plugins.overrides("engine_build_model")
        if known and not has_others(self.place.device) and self.plugins.offered("parts", "memory_plan"):
            plan = self.plugins.resolve("parts", "memory_plan")
            self.config = plan(self.config, self.plugins, roles, self.place.world_size, total)

    def push_weights(self, source: str, target: str, version: int) -> SyncResult:
        """Copy the weights of a train role to the sampler, both in this process."""
        return same_process(
            self.engines[source], self.engines[target], version, self.shared, sends_adapter(self.config)
        )

    def mix_weights(self, source: str, target: str, mix: float) -> None:
        """Mix the weights of a train role into those of another, both in this process."""
        trained, other = (cast("TrainEngine", self.engines[role]) for role in (source, target))
        other.load_named_weights(trained.named_weights(), mix)

    def trade(self, phase: str) -> None:
        """Offload the engines that are idle in ``phase``, then wake those that it needs.

        Engines free memory before others allocate it.
        """
        own = [engine for name, engine in self.engines.items() if name not in self.guests]
        trainers = [e for e in own if isinstance(e, TrainEngine)]
        samplers = [e for e in own if isinstance(e, RolloutEngine)]
        guests = [(role.phase, self.engines[name]) for name, role in self.guests.items()]
        if len(list(filter(None, (trainers, samplers, guests)))) < 2:  # no other engine needs the memory
            return
        for own_phase, guest in guests:
            if own_phase != phase:
                guest.sleep()
        idle: list[Any] = []
        needed: list[Any] = [guest for own_phase, guest in guests if own_phase == phase]
        if needed:
            idle = samplers
        elif phase == "generate":
            idle, needed = trainers, samplers
        elif phase == "train":
            idle, needed = samplers, trainers
        for engine in idle:
            engine.sleep(keep=("weights",))
        for engine in needed:
            engine.wake()

    def close(self) -> None:
        """Close the engines, the last built first."""
        self._stack.close()

    def _build_train(self, name: str, role: Role, total_steps: int) -> TrainEngine:
        config, engine = self.config.role(name), self._train_class(name)
        check_ranks(self.config, name, engine, self.place.world_size)
        has_adapter = engine.adapter_config is not TrainEngine.adapter_config
        if name == "actor" and sends_adapter(self.config) and not has_adapter:
            raise ConfigError(
                f"rollout.{self.config.rollout.backend}.adapter: actor.backend = '{config.backend}' sends only whole "
                "models. Remove the key: the engine then merges the adapter into the model."
            )
        context = self._train_context(name, role, total_steps)
        with naming_table(self.config, name, role):
            return engine(config, self.config.model_of(name), context, trainable=role.trainable)

    def _train_context(self, name: str, role: Role, total_steps: int) -> WorkerContext:
        context = self._context(name, max(total_steps - role.idle_steps, 0), role.engine_role)
        return dataclasses.replace(context, frozen=total_steps > 0 and not role.saved, mixed=role.mixed)

    def _train_class(self, name: str) -> type[TrainEngine]:
        found: type[TrainEngine] = self.plugins.resolve("train_engines", self.config.role(name).backend)
        return found

    def _build_rollout(self, name: str, role: Role, total_steps: int) -> RolloutEngine:
        if name in self._apart:
            return self._apart[name].build(self.config.sampler(name))
        config, model = self.config.sampler(name), self.config.model_of(name)
        context = self._context(name, total_steps, role.engine_role)
        build = self.plugins.resolve("rollout_engines", config.backend)
        # a reward's sampler has separate weights
        actor = None if role.engine_role else self.engines.get("actor")
        if not isinstance(actor, TrainEngine) or not self._shares(actor):
            alone: RolloutEngine = build(config, model, context)
            return alone
        live = {**(context.live or {}), "model": actor.module}
        context = dataclasses.replace(context, live=live, device=actor.context.device)
        engine: RolloutEngine = build(config, model, context)
        engine.share_module(self._module_holder(actor))
        self.shared = True
        log.info("The sampler uses the actor's module: weight sync copies nothing.")
        return engine

    def _shares(self, actor: TrainEngine) -> bool:
        """Return whether the sampler uses the actor's module, as ``rollout.weights`` says; the same on all ranks."""
        wanted = self.config.rollout.weights
        return wanted != "own" and self._can_share() and self._can_hold(actor, wanted)

    def _can_hold(self, actor: TrainEngine, wanted: str) -> bool:
        """Return whether the sampler can use the actor's module; in one process it always can."""
        return True

    def _module_holder(self, actor: TrainEngine) -> TrainEngine:
        """Return the object that provides the module to the sampler."""
        return actor

    def _start_apart(self, name: str, roles: Mapping[str, Role], total_steps: int) -> SamplerApart:
        """Start a sampler in separate processes.

        A restarted sampler receives its weights from the actor if the actor has one rank. With several ranks all of
        them would have to stream, so a sampler that may be restarted keeps a copy of its weights instead. It also keeps
        a copy if the actor may be in the middle of an update.

        Raises:
            ConfigError: the model was passed from Python.
        """
        if self.live.get("model") is not None:
            raise ConfigError(
                "[rollout.process]: a model passed from Python cannot be used in another process. Save it and set "
                "[model] path to the folder, or remove the table."
            )
        trainer = cast("TrainerSpec", self.plugins.spec("trainers", self.config.trainer))
        busy = trainer.concurrent or self.config.rollout.stream_update  # the actor works while others sample
        alone = self.place.world_size == 1 and "actor" in roles and not busy

        def source() -> Iterator[tuple[str, Tensor]]:
            """Stream the actor's weights (tensors ``[D1, ..., Dn]``)."""
            actor = cast("TrainEngine", self.engines["actor"])
            return stream_of(actor, sends_adapter(self.config), sampler=self.config.rollout)

        context = self._context(name, total_steps, roles[name].engine_role)
        processes: SamplerProcess = self.plugins.require("parts", "sampler_process")
        made = (self.config.sampler(name), self.config.model_of(name), context)
        return processes.make(*made, source if alone else None)

    def _can_share(self) -> bool:
        trainer = cast("TrainBackend", self.plugins.spec("train_engines", self.config.actor.backend))
        sampler = cast("RolloutBackend", self.plugins.spec("rollout_engines", self.config.rollout.backend))
        return "generation_module" in trainer.capabilities and "share_module" in sampler.capabilities

    def _context(self, role: str, total_steps: int, shown_role: str = "") -> WorkerContext:
        return WorkerContext(
            plugins=self.plugins,
            role=shown_role or role,
            device=self.place.device,
            rank=self.place.rank,
            world_size=self.place.world_size,
            seed=self.config.run.seed,
            deterministic=self.config.run.deterministic,
            total_steps=total_steps,
            live={} if shown_role else self.live,  # objects passed from Python belong to the actor
            actor=self.config.actor.backend if role == "rollout" else "",
        )


def default_device(index: int | None = None) -> torch.device:
    """Return the accelerator (number ``index``), if torch supports one and one is available; else the CPU."""
    found = torch.accelerator.is_available() and torch.accelerator.current_accelerator()
    if not found:
        return torch.device("cpu")
    return found if index is None else torch.device(found.type, index)
