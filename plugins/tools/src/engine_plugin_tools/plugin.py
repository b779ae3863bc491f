"""The hooks of this distribution: commands for runs and machines, trackers, and the trainer ``evaluate``."""

from __future__ import annotations

from collections.abc import Mapping

from engine_core.hooks import hookimpl
from engine_core.specs import (
    SAMPLING_SECTIONS,
    SHARED_SECTIONS,
    Command,
    Part,
    TrackerSpec,
    TrainerSpec,
)
from engine_plugin_tools.tracker_options import (
    MlflowOptions,
    PrometheusOptions,
    TensorBoardOptions,
    TrackioOptions,
    WandbOptions,
)


@hookimpl
def engine_trackers() -> Mapping[str, TrackerSpec]:
    """Offer the trackers."""
    here = "engine_plugin_tools.trackers:"
    return {
        "mlflow": TrackerSpec(load=here + "Mlflow", config=MlflowOptions),
        "prometheus": TrackerSpec(load=here + "Prometheus", config=PrometheusOptions),
        "tensorboard": TrackerSpec(load=here + "TensorBoard", config=TensorBoardOptions),
        "trackio": TrackerSpec(load=here + "Trackio", config=TrackioOptions),
        "wandb": TrackerSpec(load=here + "Wandb", config=WandbOptions),
    }


@hookimpl
def engine_trainers() -> Mapping[str, TrainerSpec]:
    """Offer ``evaluate``."""
    return {
        "evaluate": TrainerSpec(
            load="engine_plugin_tools.evaluation:Evaluation",
            sections=SHARED_SECTIONS | SAMPLING_SECTIONS - {"stage"},
            required=frozenset({"reward"}),
        )
    }


@hookimpl
def engine_parts() -> Mapping[str, Part]:
    """Offer the parts of the tools: health, checks, metrics of evaluations, plans, profiler, timeline and trackers."""
    return {
        "completion": Part(load="engine_plugin_tools.completion:completion"),
        "dry_run": Part(load="engine_plugin_tools.dry_run:dry_run"),
        "health": Part(load="engine_plugin_tools.health:Health"),
        "memory_plan": Part(load="engine_plugin_tools.memory_plan:planned"),
        "plan_check": Part(load="engine_plugin_tools.calibration:plan_check"),
        "profiler": Part(load="engine_plugin_tools.profiler:profiled"),
        "set_metrics": Part(load="engine_plugin_tools.eval_metrics:set_metrics"),
        "timeline": Part(load="engine_plugin_tools.timeline:TimelineFile"),
        "trackers": Part(load="engine_plugin_tools.tracker_threads:Trackers"),
    }


@hookimpl
def engine_commands() -> Mapping[str, Command]:
    """Offer the commands."""
    here = "engine_plugin_tools.commands."
    return {
        "validate": Command(load=here + "configs:validate"),
        "config.show": Command(load=here + "configs:show"),
        "check-template": Command(load=here + "check_template:check_template"),
        "schema": Command(load=here + "schema:schema"),
        "demo": Command(load=here + "demo:demo"),
        "plugins": Command(load=here + "plugins:plugins"),
        "doctor": Command(load=here + "doctor:doctor"),
        "generate": Command(load=here + "models:generate"),
        "eval": Command(load=here + "evaluate:evaluate"),
        "export": Command(load=here + "export:export"),
        "compare": Command(load=here + "compare:compare"),
        "report": Command(load=here + "report:report"),
        "runs": Command(load=here + "report:list_runs"),
        "watch": Command(load=here + "report:watch"),
        "grafana": Command(load=here + "grafana:grafana"),
        "inspect.data": Command(load=here + "inspect_data:data"),
        "inspect.metrics": Command(load=here + "runs:metrics"),
        "inspect.rollouts": Command(load=here + "runs:rollouts"),
        "manifest": Command(load=here + "reproduce:manifest"),
        "replay": Command(load=here + "replay:replay"),
        "reproduce": Command(load=here + "reproduce:reproduce"),
        "plan": Command(load=here + "plan:plan"),
        "prune": Command(load=here + "runs:prune"),
        "trace": Command(load=here + "trace:trace"),
        "push": Command(load=here + "push:push"),
        **{
            f"bench.{name}": Command(load=f"{here}bench:{name}")
            for name in ("train", "rollout", "sync", "step")
        },
        **{f"new.{name}": Command(load=f"{here}new:{name}") for name in ("plugin", "run")},
    }
