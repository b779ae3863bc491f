"""What must hold between keys of a config, beyond the type of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from engine_core.config.schedule import boundaries, config_at, schedule_problems
from engine_core.config.wording import Problem
from engine_core.errors import did_you_mean

if TYPE_CHECKING:
    from engine_core.config.models import EngineConfig


def cross_problems(config: EngineConfig, sections: Collection[str]) -> list[Problem]:
    """Every problem between keys.

    Args:
        config: with ``options`` filled in where they were valid.
        sections: top-level tables that the trainer reads; others are not judged.
    """
    problems = [*_duplicates(config), *_placement(config), *_values(config)]
    broken = [Problem(("schedule", key), text) for key, text in schedule_problems(config)]
    for step in [1] if broken else boundaries(config):
        now = config if broken else config_at(config, step)
        when = f"from step {step} on ([schedule]): " if step > 1 else ""
        problems += [Problem(found.path, when + found.text) for found in _each_step(now, sections)]
    return problems + broken


def _duplicates(config: EngineConfig) -> Iterator[Problem]:
    chosen = [(("reward", reward.name), reward.name) for reward in config.reward]
    chosen += [(("stage", stage.name), stage.name) for stage in config.stage]
    chosen += [(("tracking", "trackers"), tracker) for tracker in config.tracking.trackers]
    for (path, name), count in Counter(chosen).items():
        if count > 1:
            yield Problem(path, f"'{name}' stands {count} times; each name may stand once. Remove one.")


def _placement(config: EngineConfig) -> Iterator[Problem]:
    placement = config.placement
    for role in ("actor", "ref", "rollout"):
        pool = getattr(placement, role)
        if pool is not None and pool not in placement.pools:
            yield Problem(
                ("placement", role),
                f"got '{pool}', which is no pool of placement.pools.{did_you_mean(pool, placement.pools)}",
            )
        elif pool is None and len(placement.pools) > 1 and role != "ref":
            names = ", ".join(placement.pools)
            yield Problem(
                ("placement", role), f"missing. With several pools ({names}) each role names its own."
            )


def _values(config: EngineConfig) -> Iterator[Problem]:
    for reward in config.reward:
        if reward.clip is not None and reward.clip[0] >= reward.clip[1]:
            yield Problem(
                ("reward", reward.name, "clip"),
                f"got {list(reward.clip)}, expected [low, high] with low below high.",
            )
    optim = config.actor.optim
    if optim.decay_steps and optim.warmup_steps >= optim.decay_steps:
        yield Problem(
            ("actor", "optim", "decay_steps"),
            f"got {optim.decay_steps}, expected more than warmup_steps ({optim.warmup_steps}), which it includes; or 0.",
        )


def _each_step(config: EngineConfig, sections: Collection[str]) -> Iterator[Problem]:
    if "rollout" in sections and config.rollout.temperature == 0:
        yield Problem(
            ("rollout", "temperature"),
            "got 0, expected more: a greedy sampler gives a prompt the same response every time, and nothing is "
            "learned from it. For greedy evaluation set eval.temperature = 0.",
        )
    if "algorithm" not in sections:
        return
    mini, prompts = config.algorithm.mini_batch_prompts, config.data.prompts_per_step
    if mini and prompts % mini:
        fits = [size for size in range(1, prompts + 1) if prompts % size == 0]
        nearest = min(fits, key=lambda size: (abs(size - mini), size))
        yield Problem(
            ("algorithm", "mini_batch_prompts"),
            f"got {mini}, expected a divisor of data.prompts_per_step ({prompts}), such as {nearest}; 0 takes all.",
        )


def without_effect(config: EngineConfig) -> dict[str, str]:
    """Keys that are meaningless in every step, and why; harmless, but said when a file sets them."""
    first, *later = [dict(_idle(config_at(config, step))) for step in boundaries(config)]
    return {key: why for key, why in first.items() if all(key in idle for idle in later)}


def _idle(config: EngineConfig) -> Iterator[tuple[str, str]]:
    algorithm, optim = config.algorithm, config.actor.optim
    if algorithm.kl_coef == 0:
        yield from ((f"algorithm.{key}", "algorithm.kl_coef is 0") for key in ("kl_in", "kl_estimator"))
    if algorithm.loss_aggregation != "seq-mean-token-sum-norm":
        yield "algorithm.loss_length_norm", f"algorithm.loss_aggregation is '{algorithm.loss_aggregation}'"
    if algorithm.correction.level == "off":
        yield "algorithm.correction.cap", "algorithm.correction.level is 'off'"
    if optim.schedule == "constant":
        yield from (
            (f"actor.optim.{key}", "actor.optim.schedule is 'constant'")
            for key in ("decay_steps", "min_lr_ratio")
        )
