"""An observer that ends a run above a mean reward: ``engine plugins`` shows this line.

Keep this module light: a run imports it before any model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from engine_core import hookimpl
from engine_core.specs import Options


class TemplateOptions(Options):
    """``[plugin.template_name]``: checked when the run file is read."""

    reward: float = Field(default=0.9)
    """The run ends once the mean reward of a step is above this."""


@hookimpl
def engine_options() -> type[Options]:
    return TemplateOptions


@hookimpl
def engine_on_event(
    event: str, step: int, data: Mapping[str, Any], plugin_options: TemplateOptions
) -> str | None:
    """Print the reward of each step; return why the run ends after this one, or None.

    Args:
        event: what happened; the page 'Hook reference' lists all.
        step: number of the step.
        data: of the event; ``step_finished`` has ``metrics``.
        plugin_options: the table ``[plugin.template_name]``.
    """
    if event != "step_finished":
        return None
    reward = data["metrics"].get("reward/mean", 0.0)
    print(f"step {step}: reward {reward:.3f}")
    return f"The reward is above {plugin_options.reward}." if reward > plugin_options.reward else None
