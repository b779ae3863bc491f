"""The memory plan of a run: what every role of a device needs in each phase, the peak, and the change that makes it fit.

The numbers are those of the backends (``memory_need`` of an engine). The plan adds what no role knows: which roles share
a device, what sleeps in which phase, and the context of the device's library.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_core.config.roles import LoRAConfig
from engine_core.contracts.memory import MemoryNeed, MemoryQuestion
from engine_core.errors import ConfigError

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.contracts.runtime import Role
    from engine_core.plugins.plugin_set import PluginSet

GIB = 2**30
CONTEXT = int(0.6 * GIB)  # of a process: CUDA's context, and workspaces of its libraries
COLLECTIVES = int(0.4 * GIB)  # buffers of NCCL, with several ranks
UNKNOWN = "unknown"
MOST_OFFLOADED = 0.5  # of the device, for a sampler whose trainer sleeps

log = logging.getLogger("engine")


@dataclass(frozen=True)
class MemoryPlan:
    """The memory of one device.

    Attributes:
        device_bytes: of the device.
        ranks: devices that are used in the same way.
        context: bytes of the processes on the device, whatever they compute.
        offload: idle roles sleep (`offload_idle_roles`).
        together: the sampler works while others work.
        roles: the roles on the device.
        needs: of each role; None: its backend has no estimate.
    """

    device_bytes: int
    ranks: int
    context: int
    offload: bool
    together: bool
    roles: Mapping[str, Role]
    needs: Mapping[str, MemoryNeed | None]

    @property
    def phases(self) -> dict[str, int]:
        """Bytes in each phase, without the reserve."""
        names = [name for name in ("generate", "log_probs", "train") if any(self._at_work(name))]
        names += ["sync"] if any(role.kind == "rollout" for role in self.roles.values()) else []
        return {name: sum(self._in(name)) for name in names}

    @property
    def peak(self) -> int:
        """Bytes in the largest phase."""
        return max(self.phases.values(), default=self.context)

    @property
    def reserve(self) -> int:
        """Bytes to leave unused in the largest phase."""
        return max((need.reserve for _, need in self._at_work(self.largest)), default=0)

    @property
    def largest(self) -> str:
        """The phase with the peak; empty if nothing is known."""
        return max(self.phases, key=lambda name: self.phases[name], default="")

    @property
    def fits(self) -> bool:
        """Whether every phase fits, with its reserve."""
        return all(
            sum(self._in(name)) + max((need.reserve for _, need in self._at_work(name)), default=0)
            <= self.device_bytes
            for name in self.phases
        )

    @property
    def hopeless(self) -> bool:
        """Whether trained and frozen roles are too large with the smallest values that the run file allows, without reserve.

        Of a sampler only the weights count, because how little cache it can work with is not known.
        """
        return any(sum(self._in(name, least=True)) > self.device_bytes for name in ("log_probs", "train"))

    @property
    def chosen(self) -> dict[str, Any]:
        """Values of keys with ``"auto"``, by ``ROLE.KEY``."""
        return {
            f"{role}.{key}": value
            for role, need in self.needs.items()
            if need
            for key, value in need.chosen.items()
        }

    @property
    def unknown(self) -> list[str]:
        """The parts that no backend estimates, as ``ROLE`` or ``ROLE: PART``."""
        return [
            text
            for role, need in self.needs.items()
            for text in ([role] if need is None else [f"{role}: {part}" for part in need.unknown])
        ]

    def table(self) -> list[tuple[str, str, str]]:
        """Return the rows (role, part, size), then phases, peak and device."""
        rows = [("device", "context", _gib(self.context))]
        for role, need in self.needs.items():
            parts = [] if need is None else [*need.kept.items(), *need.idle.items(), *need.working.items()]
            rows += [(role, part, _gib(size)) for part, size in parts if size]
            rows += [(role, part, UNKNOWN) for part in (need.unknown if need else ("all",))]
            rows += [(role, "weights in transit", _gib(need.moving))] if need and need.moving else []
        rows += [("phase", name, _gib(size)) for name, size in self.phases.items()]
        rows += [("peak", "", _gib(self.peak)), ("reserve", "fragmentation", _gib(self.reserve))]
        rows.append(("device", "memory", _gib(self.device_bytes)))
        return rows + [("chosen", key, str(value)) for key, value in self.chosen.items()]

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain values, sizes in bytes."""
        roles = {
            role: UNKNOWN
            if need is None
            else {"kept": {**need.kept}, "idle": {**need.idle}, "working": {**need.working}}
            | {"moving": need.moving, "reserve": need.reserve, "unknown": [*need.unknown]}
            for role, need in self.needs.items()
        }
        return {
            "device_bytes": self.device_bytes,
            "devices": self.ranks,
            "context": self.context,
            "roles": roles,
            "phases": self.phases,
            "peak": self.peak,
            "reserve": self.reserve,
            "fits": self.fits,
            "chosen": self.chosen,
            "unknown": self.unknown,
        }

    def claimed(self, asking: str) -> int:
        """Return the bytes that the device and other roles hold while a role works.

        A sampler without `offload_idle_roles` keeps its cache while others work, so that their work counts too.
        """
        sampler, total, works = self.roles[asking].kind == "rollout", self.context, [0]
        for name, need in self.needs.items():
            if need is None or name == asking:
                continue
            sleeps = self.offload and (self.roles[name].kind == "rollout") != sampler
            total += sum(need.kept.values()) + (0 if sleeps else sum(need.idle.values()))
            if self.together and self.roles[name].kind == "rollout":
                total += sum(need.working.values())
            if sampler and not self.offload:
                works.append(sum(need.working.values()) + need.reserve)
        return total + max(works)

    def _at_work(self, phase: str) -> Iterator[tuple[str, MemoryNeed]]:
        """Yield the roles that compute in a phase."""
        for name, need in self.needs.items():
            role = self.roles[name]
            kind = "generate" if role.kind == "rollout" else "train" if role.trainable else "log_probs"
            if need is not None and kind == phase:
                yield name, need

    def _in(self, phase: str, least: bool = False) -> Iterator[int]:
        """Yield the bytes that are on the device in a phase."""
        yield self.context
        for name, need in self.needs.items():
            if need is None:
                continue
            if least and self.roles[name].kind == "rollout":
                yield need.kept.get("weights", 0)
                continue
            yield sum(need.kept.values())
            if not self.offload or (self.roles[name].kind == "rollout") == (phase == "generate"):
                yield sum(need.idle.values())
            elif phase == "sync":
                yield need.idle.get("weights", 0)  # an update wakes them
        if phase == "sync":
            yield max((need.moving for need in self.needs.values() if need), default=0)
        at_work = [need for _, need in self._at_work(phase)]
        if self.together and phase != "generate":
            yield max((sum(need.working.values()) for _, need in self._at_work("generate")), default=0)
        yield max((need.least if least else sum(need.working.values()) for need in at_work), default=0)


def plan_device(
    config: EngineConfig, plugins: PluginSet, roles: Mapping[str, Role], ranks: int, device_bytes: int
) -> MemoryPlan:
    """Plan the memory of a device: the sampler's share first, then what is left for the micro-batch of each role.

    With `offload_idle_roles` a chosen share is half of the device, because a resumed run loads the optimizer while the
    sampler has its cache; it is more only if the smallest cache needs more.

    Args:
        config: of the run.
        plugins: of the run.
        roles: the roles that share the device.
        ranks: number of such devices.
        device_bytes: memory of one of them.
    """
    processes = 1 + (config.rollout.process is not None and "rollout" in roles)
    context = processes * CONTEXT + (COLLECTIVES if ranks > 1 else 0)
    offload = bool(getattr(config.runtime.options, "offload_idle_roles", False))
    trainer: Any = plugins.spec("trainers", config.trainer)
    together = trainer.concurrent or bool(config.rollout.stream_update)

    def ask(name: str, free: int | None) -> MemoryNeed | None:
        return _ask(config, plugins, roles, name, ranks, device_bytes, free)

    needs = {name: ask(name, None) for name in roles}
    for kind in ("rollout", "train"):
        for name in (name for name, role in roles.items() if role.kind == kind and needs[name]):
            claimed = MemoryPlan(device_bytes, ranks, context, offload, together, roles, needs).claimed(name)
            most = int(MOST_OFFLOADED * device_bytes) if offload and kind == "rollout" else device_bytes
            needs[name] = ask(name, max(0, min(device_bytes - claimed, most)))
    return MemoryPlan(device_bytes, ranks, context, offload, together, roles, needs)


def _ask(
    config: EngineConfig,
    plugins: PluginSet,
    roles: Mapping[str, Role],
    name: str,
    ranks: int,
    device_bytes: int,
    free: int | None,
) -> MemoryNeed | None:
    """Ask the backend of a role."""
    role = roles[name]
    sampled = "rollout" in config.model_fields_set or "rollout" in roles
    table: Any = config.role(name) if role.kind == "train" else config.sampler(name)
    length = longest(config)
    rows = config.algorithm.mini_batch_prompts or config.data.prompts_per_step
    responses = config.data.prompts_per_step * config.rollout.group_size
    # evaluation, sampling ahead and surplus responses have as many as the sampler takes
    bounded = config.trainer == "rl" and not config.eval.during_training and config.rollout.over_sampling == 1
    read: int = getattr(config.options, "max_tokens", 0)  # of a row with its response
    if read and role.kind == "train":
        sampled = "rollout" in roles
        length = (length and max(length, read)) if sampled else read
    trains = any(each.kind == "train" and each.trainable for each in roles.values())
    together = (getattr(table.options, key, 1) for key in ("sp", "tp", "tensor_parallel_size"))
    slices = ranks // math.prod(together) or 1
    tokens = rows * (length or 0) * (config.rollout.group_size if sampled else 1)
    known = sampled or config.trainer == "sft"
    question = MemoryQuestion(
        role.engine_role or name,
        trainable=role.trainable and role.kind == "train",
        frozen=not role.saved,
        ranks=ranks,
        device_bytes=device_bytes,
        free=free,
        tokens=-(-tokens // slices) if known and length else None,
        length=length if known or read else None,
        sequences=-(-responses // slices) if bounded and trains else None,
    )
    model = config.model_of(name)
    kind = "train_engines" if role.kind == "train" else "rollout_engines"
    found: MemoryNeed | None = plugins.resolve(kind, table.backend).memory_need(table, model, question)
    return found


def longest(config: EngineConfig) -> int | None:
    """Return the maximum tokens of a sampled sequence; None: that of the model."""
    if config.environment is not None:
        return config.environment.max_tokens
    return config.data.max_prompt_tokens + config.rollout.max_response_tokens


def changes(config: EngineConfig) -> Iterator[tuple[str, EngineConfig]]:
    """Yield changes of a run file that need less memory, with the changed config.

    First each alone, then the first two, three and so on together; an adapter in place of the whole model comes last.
    """
    wanted: list[tuple[str, tuple[str, ...], Any]] = []
    if config.actor.max_tokens_per_rank != "auto":
        wanted.append(('actor.max_tokens_per_rank = "auto"', ("actor", "max_tokens_per_rank"), "auto"))
    options: Any = config.actor.options
    how = getattr(options, "activation_checkpointing", None)
    if how in (False, "none"):
        value = "full" if how == "none" else True
        said = f'"{value}"' if isinstance(value, str) else "true"
        key = f"actor.{config.actor.backend}.activation_checkpointing = {said}"
        wanted.append((key, ("actor", "options", "activation_checkpointing"), value))
    if getattr(options, "gradient_sync", None) == "last":
        key = f'actor.{config.actor.backend}.gradient_sync = "each"'
        wanted.append((key, ("actor", "options", "gradient_sync"), "each"))
    share = getattr(config.rollout.options, "gpu_memory_utilization", "auto")
    if share != "auto":
        key = f'rollout.{config.rollout.backend}.gpu_memory_utilization = "auto"'
        wanted.append((key, ("rollout", "options", "gpu_memory_utilization"), "auto"))
    if getattr(config.runtime.options, "offload_idle_roles", None) is False:
        key = f"runtime.{config.runtime.backend}.offload_idle_roles = true"
        wanted.append((key, ("runtime", "options", "offload_idle_roles"), True))
    if getattr(config.rollout.options, "sleep_level", None) == 1:
        wanted.append(
            (f"rollout.{config.rollout.backend}.sleep_level = 2", ("rollout", "options", "sleep_level"), 2)
        )
    most = longest(config)
    if most and getattr(config.rollout.options, "max_model_len", 0) is None:
        key = f"rollout.{config.rollout.backend}.max_model_len = {most}"
        wanted.append((key, ("rollout", "options", "max_model_len"), most))
    for said, path, value in wanted:
        yield said, _with(config, path, value)
    together = config
    texts: list[str] = []
    combined = [(texts, config)]
    for said, path, value in wanted:
        together, texts = _with(together, path, value), [*texts, said]
        combined.append((texts, together))
    for texts, changed in combined[2:]:
        yield " and ".join(texts), changed
    if config.actor.lora is None:
        for texts, changed in combined:
            said = " and ".join(["an adapter ([actor.lora])", *texts])
            yield said, _with(changed, ("actor", "lora"), LoRAConfig())


def _with(table: Any, path: Sequence[str], value: Any) -> Any:
    """Return a copy of a table with another value at a path; what the copy shares with the table is unchanged."""
    name, *rest = path
    return table.model_copy(update={name: _with(getattr(table, name), rest, value) if rest else value})


def nearest_change(
    config: EngineConfig, plugins: PluginSet, roles: Mapping[str, Role], ranks: int, device_bytes: int
) -> str:
    """Return the first change with which a device's roles fit, as text for a message; empty if none is known."""
    for said, changed in changes(config):
        kept = {name: role for name, role in roles.items() if name != "ref" or not changed.ref_is_base}
        if plan_device(changed, plugins, kept, ranks, device_bytes).fits:
            return said
    shards = hasattr(config.actor.options, "sharding") or hasattr(config.actor.options, "stage")
    for more in (2, 4, 8):
        if shards and plan_device(config, plugins, roles, ranks * more, device_bytes).fits:
            return f"{ranks * more} devices"
    return ""


def planned(
    config: EngineConfig, plugins: PluginSet, roles: Mapping[str, Role], ranks: int, device_bytes: int
) -> EngineConfig:
    """Log the plan of a device and return the config with what the plan chose; a part that a run calls.

    The sampler's share and recomputation are set. They stay as they are where a role has no estimate. Each trained role
    chooses its micro-batch itself, when the memory is known. Nothing is planned for an export.

    Args:
        config: of the run.
        plugins: of the run.
        roles: the roles of this process.
        ranks: processes of its pool.
        device_bytes: memory of its device.

    Raises:
        ConfigError: the smallest values that the run file allows do not fit; the nearest change is named.
    """
    if not any(role.kind == "rollout" or role.trainable for role in roles.values()):
        return config
    try:
        plan = plan_device(config, plugins, roles, ranks, device_bytes)
        change = "" if plan.fits else nearest_change(config, plugins, roles, ranks, device_bytes)
    except Exception:  # a run must not fail because of an estimate
        log.warning("The memory of this device could not be planned.", exc_info=True)
        return config
    log.info("Memory plan of one device, by estimate:")
    for role, part, size in plan.table():
        log.info("    %-12s %-24s %s", role, part, size)
    if plan.hopeless:
        raise ConfigError(f"{too_small(plan, change)} `engine plan` prints the table.")
    if not plan.fits:
        log.warning("%s `engine plan` prints the table.", too_small(plan, change))
    for key, value in plan.chosen.items() if not plan.unknown else ():
        role, *_, name = key.split(".")
        if role in ("actor", "critic", "rollout") and name != "max_tokens_per_rank":
            config = _with(config, (role, "options", name), value)
    return config


def too_small(plan: MemoryPlan, change: str) -> str:
    """Return the message for a plan that does not fit."""
    advice = f"It fits with {change}." if change else "No change of this run file is known that fits."
    return (
        f"The memory of the device ({_gib(plan.device_bytes)}) does not suffice, by estimate: phase '{plan.largest}' needs "
        f"{_gib(plan.peak)} and a reserve of {_gib(plan.reserve)}. {advice}"
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
