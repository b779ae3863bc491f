"""The hooks of this plugin. Keep this module light: a run imports it before any model is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from engine_core import hookimpl
from engine_core.metrics import Sum
from engine_core.specs import Options, Stage
from engine_core.types import StageState

if TYPE_CHECKING:
    from engine_core.types import Rollout


class TemplateOptions(Options):
    """``[stage.template_name]``: checked when the run file is read, shown by ``engine schema``."""

    times: int = Field(default=1, gt=0)
    """Steps in which a prompt is learned from."""


class TemplateName:
    """A stage that drops the rollouts of prompts that were learned from before; what it counts is in checkpoints.

    Args:
        times: from the options.
    """

    def __init__(self, times: int) -> None:
        self.times, self.seen = times, dict[str, int]()

    def __call__(self, rollouts: list[Rollout], step: int) -> tuple[list[Rollout], dict[str, float]]:
        """Return the rollouts to keep, and numbers that are logged as ``stage/template_name/...``."""
        kept = [rollout for rollout in rollouts if self.seen.get(rollout.prompt.id, 0) < self.times]
        for prompt in {rollout.prompt.id for rollout in kept}:
            self.seen[prompt] = self.seen.get(prompt, 0) + 1
        return kept, {"kept": Sum(len(kept))}

    def state(self) -> StageState:
        """Return what a checkpoint holds: values that JSON can hold, and rollouts."""
        return StageState({"seen": dict(self.seen)})

    def load_state(self, state: StageState) -> None:
        """Continue with what ``state`` returned."""
        self.seen = dict(state.values["seen"])


@hookimpl
def engine_stages() -> Mapping[str, Stage]:
    return {"template_name": Stage(load=TemplateName, config=TemplateOptions)}
