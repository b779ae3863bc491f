"""The simulated backends: only a simulation knows them, since it lists this file in `plugins`."""

from collections.abc import Mapping

from engine_core.hooks import hookimpl
from engine_core.specs import Environment, Options, RolloutBackend, RuntimeSpec, TrainBackend

HERE = "virtual_cluster"


class ToolsOptions(Options):
    """``[environment.slow_tools]``."""

    turns: int
    """Turns of an episode."""
    least: float
    """Seconds of the shortest tool call."""
    most: float
    """Seconds of the longest tool call."""
    tokens: int
    """Most tokens of a turn."""


@hookimpl
def engine_environments() -> Mapping[str, Environment]:
    """Offer episodes with tools that take virtual time."""
    return {
        "slow_tools": Environment(
            load=f"{HERE}.episodes:tools", config=ToolsOptions, rewards=frozenset({"played"})
        )
    }


@hookimpl
def engine_runtimes() -> Mapping[str, RuntimeSpec]:
    """Offer the simulated cluster."""
    return {"simulated": RuntimeSpec(load=f"{HERE}.runtime:SimulatedRuntime")}


@hookimpl
def engine_train_engines() -> Mapping[str, TrainBackend]:
    """Offer a name that is never loaded: ``SimulatedRuntime`` builds no engine."""
    return {"simulated": TrainBackend(load=f"{HERE}.workers:SimulatedTrainer")}


@hookimpl
def engine_rollout_engines() -> Mapping[str, RolloutBackend]:
    """Offer a name that is never loaded, with the capabilities of a real sampler, which the controller checks."""
    able = frozenset({"partial", "pause"})
    return {"simulated": RolloutBackend(load=f"{HERE}.workers:SimulatedSampler", capabilities=able)}
