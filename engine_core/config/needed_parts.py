"""Parts that a run file asks for and that the kernel does not contain, so that ``engine validate`` misses none of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from engine_core.plugins.metadata import unknown_name

if TYPE_CHECKING:
    from engine_core.config import EngineConfig
    from engine_core.plugins import PluginSet
    from engine_core.specs import TrainerSpec


def absent_parts(config: EngineConfig, plugins: PluginSet, spec: TrainerSpec) -> list[str]:
    """Return a line for each part that the run needs and no installed plugin offers.

    Args:
        config: of the run.
        plugins: of the run.
        spec: of its trainer.
    """
    return [
        f"{key}: {unknown_name('parts', part)}"
        for part, key in dict(_needed(config, spec)).items()
        if not plugins.offers("parts", part)
    ]


def _needed(config: EngineConfig, spec: TrainerSpec) -> Iterator[tuple[str, str]]:
    """Yield each part that the run asks for, and the key that does."""
    sections = spec.sections or set(type(config).model_fields)
    evaluates = "eval" in sections and config.eval.during_training
    read = sections if evaluates else sections - spec.for_eval
    for reward in config.reward if "reward" in read else ():
        if reward.has_model:
            yield "reward_models", f"reward.{reward.name}"
        elif reward.workers != 0:
            yield "reward_workers", f"reward.{reward.name}.workers"
    if "environment" in read and config.environment is not None:
        yield "episodes", "environment"
    if "data" in read and config.data.num_workers:
        yield "row_workers", "data.num_workers"
    if "rollout" in read and config.rollout.process is not None:
        yield "sampler_process", "rollout.process"
    if "rollout" in read and "rollout" not in spec.for_eval and config.rollout.over_sampling > 1:
        yield "early_stop", "rollout.over_sampling"
