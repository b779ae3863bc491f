"""The hooks of this plugin. Keep this module light: a run imports it before any model is built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from engine_core import hookimpl
from engine_core.algorithms.objectives import with_weights
from engine_core.specs import SAMPLING_SECTIONS, SHARED_SECTIONS, Options, TrainerSpec
from engine_core.train.sampled_run import SampledRun
from engine_core.types import LossCall


class TemplateOptions(Options):
    """``[template_name]``: checked when the run file is read, shown by ``engine schema``."""

    keep: int = Field(default=1, gt=0)
    """Responses of each group that are learned: those with the highest rewards."""


class TemplateName(SampledRun):
    """Expert iteration: sample, keep the best responses of each group, learn them as supervised fine-tuning does."""

    def prepare(self) -> None:
        """Set the trainer's own state; ``state`` is called before the first step, too."""
        super().prepare()
        self.best = float("-inf")

    def step(self, step: int) -> dict[str, float]:
        """Do one step; return its metrics."""
        rollouts, metrics = self.rollouts(step)  # sampled, scored, through the stages
        groups: dict[int, list[Any]] = {}
        for rollout in (each for each in rollouts if each.valid):
            groups.setdefault(rollout.group_id, []).append(rollout)
        kept = []
        for members in groups.values():
            members.sort(key=lambda rollout: rollout.reward, reverse=True)
            kept += members[: self.config.options.keep]
        self.best = max([self.best, *(rollout.reward for rollout in kept)])
        metrics["template_name/best"] = self.best
        if kept:
            with self.phase("train"):
                metrics |= self.learn(with_weights(self.batch(kept), "token-mean"), LossCall("nll"))
        return metrics | self.sync()  # the sampler has the new weights

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds: values that JSON can hold."""
        return {**super().state(), "best": self.best}

    def load_state(self, state: dict[str, Any], folder: Path) -> None:
        """Continue with what ``state`` returned."""
        super().load_state(state, folder)
        self.best = state["best"]


@hookimpl
def engine_trainers() -> Mapping[str, TrainerSpec]:
    spec = TrainerSpec(
        load=TemplateName,
        config=TemplateOptions,
        sections=SHARED_SECTIONS | SAMPLING_SECTIONS,  # and its own table, which needs no entry
        required=frozenset({"data", "reward"}),
    )
    return {"template_name": spec}
