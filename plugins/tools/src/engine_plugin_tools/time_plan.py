"""The seconds of a step by phase: the floor by the device's data sheet, and an estimate by what backends have measured.

A backend answers with its speed (``MemoryNeed.speed``); the operations of a token are those of ``bench.shapes.Cost``.
Ratios of measured and planned seconds, kept by ``engine plan --calibrate``, correct later estimates on such devices.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine_core.config.models import ModelConfig
from engine_core.contracts.memory import DecodeSpeed, PassSpeed
from engine_core.model_config import load_hf_config
from engine_plugin_tools.bench.shapes import Cost
from engine_plugin_tools.memory_plan import GIB, MemoryPlan, longest, plan_device

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.contracts.runtime import Role
    from engine_core.train.run import TrainingRun
    from engine_plugin_tools.devices import Device, Limits

ROWS = 64  # rows of the data whose lengths are looked at
BETWEEN = 1 / 30e9  # seconds for each byte of weights that go to another process
GATHERED = 1 / 60e9  # and of weights that ranks have in parts (4B and 1.7B on two H200s)
SWITCH = 0.35  # seconds in which a sampler and a trainer hand their memory over
SMALL = 8192  # tokens of the smallest micro-batch that was measured
FORWARD, BOTH = 1, 3  # products of a weight and a token: forward; forward and backward
RL = "policy"  # attribute of a trainer for reinforcement learning
WITH_HEAD = ("actor", "ref", "teacher")  # roles whose outputs are of the vocabulary


@dataclass(frozen=True)
class Lengths:
    """The sequences of a step.

    Attributes:
        sequences: number of them.
        prompt: mean tokens that are not learned.
        response: mean tokens that are.
        most: tokens of the longest response.
        group: responses to the same prompt.
    """

    sequences: float
    prompt: float
    response: float
    most: float
    group: int = 1

    def __str__(self) -> str:
        return (
            f"{self.sequences:,.0f} sequences of {self.prompt:,.0f} + {self.response:,.0f} tokens in the mean"
        )

    @property
    def squares(self) -> float:
        """Mean of the squared tokens of responses: like waiting times if the longest is longer than the mean."""
        return min(2 * self.response, self.most) * self.response

    @property
    def seen(self) -> float:
        """Sum of the squared lengths of the sequences."""
        return self.sequences * (self.prompt**2 + 2 * self.prompt * self.response + self.squares)

    @property
    def tokens(self) -> float:
        """Tokens of a step."""
        return self.sequences * (self.prompt + self.response)


@dataclass(frozen=True)
class Phase:
    """The seconds of a phase of a step; None: unknown.

    Attributes:
        floor: least seconds by the data sheet.
        seconds: estimate.
        says: the assumptions, or why it is unknown.
        backend: the backend that does the work, for calibration.
    """

    floor: float | None
    seconds: float | None
    says: str
    backend: str = ""


@dataclass(frozen=True)
class StepPlan:
    """The phases of a step, by name; those of a concurrent trainer overlap with sampling."""

    phases: Mapping[str, Phase]
    concurrent: bool = False

    @property
    def seconds(self) -> float | None:
        """Seconds of a step without the phases that are unknown; None if those of sampling or training are."""
        return self._whole({name: phase.seconds for name, phase in self.phases.items()})

    @property
    def floor(self) -> float | None:
        """Least seconds of a step, as ``seconds``."""
        return self._whole({name: phase.floor for name, phase in self.phases.items()})

    def _whole(self, parts: Mapping[str, float | None]) -> float | None:
        known = {name: seconds for name, seconds in parts.items() if seconds is not None}
        if "train" not in known or ("generate" in self.phases and "generate" not in known):
            return None
        sampling = known.pop("generate", 0.0)
        return max(sampling, sum(known.values())) if self.concurrent else sampling + sum(known.values())

    def as_json(self, steps: int) -> dict[str, Any]:
        """Return the plan of ``steps`` steps as plain values; None: unknown."""
        phases = {n: {"floor": p.floor, "seconds": p.seconds, "says": p.says} for n, p in self.phases.items()}
        run = None if self.seconds is None else steps * self.seconds
        return {"phases": phases, "floor": self.floor, "step": self.seconds, "run": run}

    def table(self) -> list[tuple[str, str, str, str]]:
        """Return the rows (phase, floor, seconds, assumptions), with the step last."""
        rows = [(name, _s(p.floor), _s(p.seconds), p.says) for name, p in self.phases.items()]
        how = "the longer of sampling and the rest" if self.concurrent else "the sum of what is known"
        return [*rows, ("step", _s(self.floor), _s(self.seconds), how)]


def pools(
    config: EngineConfig, roles: Mapping[str, Role], count: int, plugins: Any
) -> Iterator[tuple[str, int, dict[str, Role]]]:
    """Yield (label, ranks, roles) of each group of devices that are used in the same way."""
    if plugins.spec("runtimes", config.runtime.backend).in_process:
        yield "this process", 1, dict(roles)
        return
    if config.placement.pools:
        for pool, size in config.placement.pools.items():
            inside = {name: role for name, role in roles.items() if config.placement.pool_of(name) == pool}
            if inside:
                yield f"pool {pool}", size, inside
        return
    processes: Any = getattr(config.runtime.options, "processes", "auto")
    yield "all processes", count if processes == "auto" else processes, dict(roles)


def plans_of(trainer: TrainingRun, device: Device) -> Iterator[tuple[str, MemoryPlan]]:
    """Yield (label, memory plan) of each group of devices that are used in the same way.

    Args:
        trainer: whose inputs are loaded.
        device: of the run; its number counts if the run file names no number of processes.
    """
    config, plugins = trainer.config, trainer.plugins
    for label, ranks, inside in pools(config, planned_roles(trainer), device.count, plugins):
        yield label, plan_device(config, plugins, inside, ranks, device.memory)


def planned_roles(trainer: TrainingRun) -> dict[str, Role]:
    """Return the roles that have weights; a reference that is the actor without its adapter has none."""
    roles = trainer.roles(training=True)
    if trainer.config.ref_is_base:
        roles.pop("ref", None)
    return roles


def lengths_of(trainer: Any, response: float | None = None) -> Lengths | None:
    """Return the lengths of the first rows of the data; None for a trainer whose rows are no sequences.

    Args:
        trainer: whose inputs are loaded; rows are taken from its source.
        response: mean tokens of a response; None: as many as the run allows.
    """
    config: EngineConfig = trainer.config
    items = trainer.source.take(min(config.data.prompts_per_step, ROWS))
    rows, group = config.data.prompts_per_step, config.rollout.group_size
    if trainer.samples:
        whole, prompt = longest(config), statistics.fmean(len(item.token_ids) for item in items)
        if whole is None:
            return None
        most = config.rollout.max_response_tokens if config.environment is None else max(1.0, whole - prompt)
        return Lengths(rows * group, prompt, min(response or most, most), most, group)
    if hasattr(items[0], "loss_mask"):
        counts, learned = [len(each.token_ids) for each in items], sum(sum(each.loss_mask) for each in items)
    elif hasattr(trainer, "loss_call"):  # of preferences: pairs are two sequences
        batch = trainer.batch(items)
        counts, learned = batch.lengths.tolist(), int(batch["loss_mask"].sum())
    else:
        return None
    mean = learned / len(counts)
    return Lengths(rows * len(counts) / len(items), sum(counts) / len(counts) - mean, mean, max(counts))


def measured_lengths(config: EngineConfig, lines: Sequence[Mapping[str, Any]]) -> Lengths | None:
    """Return the lengths of a run's steps by their metrics; None if they have no tokens."""
    tokens, rows = median(lines, "tokens/total"), config.data.prompts_per_step
    if tokens is None:
        return None
    if (response := median(lines, "response_length/mean")) is not None:
        sequences, most = rows * config.rollout.group_size, median(lines, "response_length/max") or response
        prompt = max(0.0, tokens / sequences - response)
        return Lengths(sequences, prompt, response, most, config.rollout.group_size)
    learned = median(lines, "tokens/learned") or tokens
    return Lengths(rows, (tokens - learned) / rows, learned / rows, tokens / rows)


def plan_step(
    trainer: Any, plans: Sequence[MemoryPlan], limits: Limits, lengths: Lengths, ratios: Mapping[str, float]
) -> StepPlan | None:
    """Plan the seconds of a step; None for a model whose operations are not known.

    Args:
        trainer: whose inputs are loaded.
        plans: of the run's groups of devices.
        limits: of each device.
        lengths: of the step's sequences.
        ratios: measured by planned seconds, by ``PHASE.BACKEND``.
    """
    config: EngineConfig = trainer.config
    where = {name: plan for plan in plans for name in plan.roles}
    found: dict[str, Phase] = {}
    roles = {name: plan.roles[name] for name, plan in where.items()}
    learning = [name for name, role in roles.items() if role.kind == "train" and role.trainable]
    if not learning or (cost := _cost(config, learning[0])) is None:
        return None
    if "rollout" in where:
        found["generate"] = _sampling(config, cost, where["rollout"], limits, lengths)
        found["reward"] = Phase(None, None, "rewards are not planned")
    passes = [_passes(trainer, where[name], name, limits, lengths, BOTH) for name in learning]
    inferring = [
        _passes(trainer, where[name], name, limits, lengths, FORWARD) for name in _inferring(trainer)
    ]
    if inferring:
        found["log_probs"] = _sum(inferring)
    found["train"] = _sum(passes)
    if "rollout" in where:
        found["sync"] = _sync(config, where[learning[0]], where["rollout"], limits)
    found["save"] = Phase(None, None, "the disk's rate is not known")
    for name, phase in found.items():
        ratio = ratios.get(f"{name}.{phase.backend}")
        if ratio and phase.seconds is not None:
            found[name] = replace(
                phase, seconds=phase.seconds * ratio, says=f"{phase.says}; calibrated: {ratio:.2f} times"
            )
    return StepPlan(found, trainer.plugins.spec("trainers", config.trainer).concurrent)


def _cost(config: EngineConfig, name: str) -> Cost | None:
    """Return the operations of a role's model; None if they are not known."""
    return _cost_of(config.model_of(name).model_dump_json())


@functools.lru_cache(maxsize=16)
def _cost_of(table: str) -> Cost | None:
    """Return the operations of a model by its table as JSON; each step asks."""
    config = load_hf_config(ModelConfig.model_validate_json(table))
    return Cost.of(config.get_text_config(decoder=True).to_dict())


def _sampling(config: EngineConfig, cost: Cost, plan: MemoryPlan, limits: Limits, lengths: Lengths) -> Phase:
    """Plan the sampling of a step: the decode steps until the longest response ends, and the prompts, once a group."""
    need, backend = plan.needs["rollout"], config.rollout.backend
    speed = need.speed if need else None
    if config.environment is not None:
        return Phase(None, None, "turns and tools of episodes are not planned")
    if not isinstance(speed, DecodeSpeed):
        return Phase(None, None, f"{backend} with these options has no measured speed")
    number = lengths.sequences / plan.ranks
    cache = sum(parts.get("cache", 0) for parts in (need.kept, need.idle)) if need else 0
    whole = lengths.prompt + lengths.response
    together = min(speed.together, number, max(1.0, cache / speed.token / whole) if cache else number)
    new = number * lengths.response
    steps = max(lengths.most, new / together)
    held = (
        lengths.prompt * lengths.response + lengths.squares / 2
    )  # tokens of a cache, summed over decode steps
    read = number * held * speed.token / limits.bandwidth
    weights = steps * speed.weights / limits.bandwidth
    products = 2 * (cost.body + cost.head) * new / limits.flops
    prompts = 2 * cost.body * number / lengths.group * lengths.prompt / limits.flops
    seconds = read / speed.reading + max(weights, products / speed.products) + prompts / speed.products
    says = f"{together:,.0f} responses at a time, the longest of {lengths.most:,.0f} tokens"
    return Phase(
        max(read + weights, products) + prompts,
        seconds + steps * speed.step + new * speed.sequence,
        f"{says}; {speed.source}",
        backend,
    )


def _passes(trainer: Any, plan: MemoryPlan, name: str, limits: Limits, lengths: Lengths, times: int) -> Phase:
    """Plan the passes of a role over the sequences of a step.

    Args:
        times: ``FORWARD`` or ``BOTH``.
    """
    config: EngineConfig = trainer.config
    table, need, cost = config.role(name), plan.needs[name], _cost(config, name)
    speed, both = need.speed if need else None, times == BOTH
    if cost is None:
        return Phase(None, None, f"{name}: the operations of this model are not known")
    epochs = config.algorithm.epochs if both and hasattr(trainer, RL) else 1
    updates = trainer.optimizer_steps_per_step if both else 1
    tokens = epochs * lengths.tokens / plan.ranks
    learned = epochs * lengths.sequences * lengths.response / plan.ranks
    head = learned * cost.head if name in WITH_HEAD else 0.0
    weights = 2 if both and table.lora is not None else times  # frozen weights get no gradient
    body = 2 * weights * cost.body * tokens
    attention = 2 * times * cost.attention * epochs * lengths.seen / plan.ranks
    floor = (body + 2 * weights * head + attention) / limits.flops
    if not isinstance(speed, PassSpeed):
        return Phase(floor, None, f"{name}: {table.backend} with these options has no measured speed")
    again = 1 + (speed.repeated / 3 if both else 0)
    seconds = (body * again + 2 * weights * head) / limits.flops / speed.products
    seconds += attention * again / limits.flops / speed.attention
    seconds += tokens * cost.streams * speed.traffic * again * times / BOTH / limits.bandwidth
    seconds += updates * cost.layers * speed.layer * times / BOTH
    says = f"{name}: {tokens:,.0f} tokens a device, {floor / seconds:.0%} of the device's rate"
    says += f", {speed.repeated:.0%} of the layers recomputed" if both and speed.repeated else ""
    micro: Any = need.chosen.get("max_tokens_per_rank", table.max_tokens_per_rank) if need else "auto"
    small = micro != "auto" and micro < min(SMALL, tokens)
    says += f", {micro} a micro-batch (not measured)" if small else ""
    return Phase(floor, seconds, f"{says}; {speed.source}", table.backend)


def _inferring(trainer: Any) -> list[str]:
    """Return the roles that annotate the sequences of a step; the actor for a reference that is its base."""
    roles = planned_roles(trainer)
    policy = getattr(trainer, RL, None)
    if policy is None:
        return [name for name, role in roles.items() if role.kind == "train" and not role.trainable]
    bypassed = {"old_log_probs"} if trainer.config.algorithm.correction.bypass else set()
    asked = [policy.plan.producers[column].role for column in policy.plan.columns if column not in bypassed]
    return [name if name in roles else "actor" for name in dict.fromkeys(asked)]


def _sync(config: EngineConfig, actor: MemoryPlan, sampler: MemoryPlan, limits: Limits) -> Phase:
    """Plan the update of the sampler's weights."""
    need, backend = sampler.needs["rollout"], config.rollout.backend
    speed = need.speed if need else None
    if not isinstance(speed, DecodeSpeed):
        return Phase(None, None, f"{backend} with these options has no measured speed")
    alone = actor is sampler and config.rollout.process is None
    each = speed.update + (0.0 if alone else BETWEEN)
    if not each:
        return Phase(0.0, 0.0, "the sampler uses the actor's weights", backend)
    whole = actor.ranks == 1 or getattr(config.actor.options, "sharding", "") == "none"
    each += 0.0 if whole else GATHERED
    seconds = speed.weights * each + (SWITCH if sampler.offload else 0.0)
    says = f"{speed.weights / GIB:.2f} GiB of weights" + (", memory handed over" if sampler.offload else "")
    return Phase(speed.weights / limits.bandwidth, seconds, f"{says}; {speed.source}", backend)


def _sum(phases: Sequence[Phase]) -> Phase:
    """Return phases that follow each other as one; unknown if one is."""
    unknown = [phase for phase in phases if phase.seconds is None]
    if unknown:
        return unknown[0]
    floor, seconds = (sum(getattr(p, key) for p in phases) for key in ("floor", "seconds"))
    return Phase(floor, seconds, "; ".join(p.says for p in phases), phases[0].backend)


def median(lines: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the median of a metric over the steps that have it; None if none has."""
    values = [line[name] for line in lines if line.get(name) is not None]
    return statistics.median(values) if values else None


def _s(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds:.3g} s"
