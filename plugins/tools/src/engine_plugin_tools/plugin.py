"""The hooks of this distribution: commands for runs and machines, and trackers."""

from __future__ import annotations

from collections.abc import Mapping

from engine_core.hooks import hookimpl
from engine_core.specs import Command, Part, TrackerSpec
from engine_plugin_tools.tracker_options import TensorBoardOptions, WandbOptions


@hookimpl
def engine_trackers() -> Mapping[str, TrackerSpec]:
    """Offer ``tensorboard`` and ``wandb``."""
    return {
        "tensorboard": TrackerSpec(
            load="engine_plugin_tools.trackers:TensorBoard", config=TensorBoardOptions
        ),
        "wandb": TrackerSpec(load="engine_plugin_tools.trackers:Wandb", config=WandbOptions),
    }


@hookimpl
def engine_parts() -> Mapping[str, Part]:
    """Offer ``advice``."""
    return {"advice": Part(load="engine_plugin_tools.advice:advice")}


@hookimpl
def engine_commands() -> Mapping[str, Command]:
    """Offer the commands."""
    here = "engine_plugin_tools.commands."
    measure = "Measure the parts of a run on this machine."
    start = "Start a plugin or a run file from a template."
    return {
        "check-template": Command(load=here + "check_template:check_template"),
        "schema": Command(load=here + "schema:schema"),
        "demo": Command(load=here + "demo:demo"),
        "doctor": Command(load=here + "doctor:doctor"),
        "generate": Command(load=here + "models:generate"),
        "eval": Command(load=here + "models:evaluate"),
        "compare": Command(load=here + "compare:compare"),
        "report": Command(load=here + "runs:report"),
        "inspect.rollouts": Command(load=here + "runs:rollouts", group_help="Look into a run."),
        "replay": Command(load=here + "replay:replay"),
        "prune": Command(load=here + "runs:prune"),
        **{
            f"bench.{name}": Command(load=f"{here}bench:{name}", group_help=measure)
            for name in ("train", "rollout", "sync", "step", "comm")
        },
        **{f"new.{name}": Command(load=f"{here}new:{name}", group_help=start) for name in ("plugin", "run")},
    }
